"""Runs what a wheel of vLLM's for CPUs packs keys and values with on a processor with AMX.

A process of its own: ``python -m tests.upstream.compiled_packing LIBRARY COPY``. The library as a
whole needs AVX-512, and ends a process on another processor while it is loaded. The one function
that packs needs none of it: it moves words. So it is called by its place in a copy of the library
whose initialisers are left out.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.geometry.packed_tiles import packed_keys, packed_values
from tests.lab.kinds import amx_planes

_NAME = (
    "_ZN13cpu_attention13AttentionImplILNS_3ISAE0EN3c108BFloat16ELl{channels}ES3_E17"
    "reshape_and_cacheEPKS3_S6_PS3_S7_PKllllllllllllff._omp_fn.0"
)
#: Of entries of the dynamic section, and what a loader makes nothing of.
_INITIALISERS, _SIZES, _NOTHING = (12, 13), (27, 28), 0x6FFFFEF0
_DYNAMIC, _SYMBOLS = 2, 2
_LAZY = 1

HEADS, BLOCKS = 2, 3
SHAPES = [(channels, tokens) for channels in (32, 64, 128, 256) for tokens in (32, 64, 96, 128)]


def without_initialisers(library: bytes) -> bytes:
    """The same library, of which nothing runs while it is loaded."""
    found = bytearray(library)
    (start,) = struct.unpack_from("<Q", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    for at in range(start, start + size * count, size):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", library, at)
        if kind != _DYNAMIC:
            continue
        for entry in range(offset, offset + length, 16):
            (tag,) = struct.unpack_from("<Q", library, entry)
            if tag in _INITIALISERS:
                struct.pack_into("<Q", found, entry, _NOTHING)
            elif tag in _SIZES:
                struct.pack_into("<Q", found, entry + 8, 0)
    return bytes(found)


def places(library: bytes) -> dict[str, int]:
    """Where each wanted function is, from the library's beginning."""
    wanted = {_NAME.format(channels=channels): channels for channels, _ in SHAPES}
    found = {}
    for name, value in _symbols(library):
        if name in wanted:
            found[name] = value
    return found


def _symbols(library: bytes) -> Iterator[tuple[str, int]]:
    (start,) = struct.unpack_from("<Q", library, 40)
    size, count = struct.unpack_from("<HH", library, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", library, start + n * size) for n in range(count)]
    for _, kind, _, _, offset, length, link, _, _, entry_bytes in headers:
        if kind != _SYMBOLS:
            continue
        names = headers[link][4]
        for entry in range(offset, offset + length, entry_bytes):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", library, entry)
            end = library.index(b"\0", names + name)
            yield library[names + name : end].decode(), value


def packed(place: int, keys: np.ndarray, values: np.ndarray, block_tokens: int) -> np.ndarray:
    """[block, head, keys and then values, item] of [block * token, head, channel], from 0.26 on."""
    channels = keys.shape[2]
    piece = block_tokens * channels
    cache = np.zeros((BLOCKS, HEADS, 2, piece), dtype=np.uint16)
    slots = np.arange(len(keys), dtype=np.int64)
    steps = [stride // 2 for stride in keys.strides[:2]]
    told = (
        *(keys.ctypes.data, values.ctypes.data, slots.ctypes.data, len(keys)),
        *(steps[0], steps[0], HEADS, steps[1], steps[1]),
        *(HEADS * 2 * piece, 2 * piece, block_tokens),
        *(cache.ctypes.data, cache[0, 0, 1].ctypes.data, 0),
    )
    arguments = (ctypes.c_int64 * len(told))(*told)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(place)(ctypes.addressof(arguments))
    return cache


def main(library: Path, copy: Path) -> int:
    """Prints what was compared; 0 where the wheel packs as the tests' stand-ins do."""
    import torch  # whose libraries this one wants  # noqa: F401

    raw = library.read_bytes()
    found = places(raw)
    copy.write_bytes(without_initialisers(raw))
    ctypes.CDLL(str(copy), mode=_LAZY)
    maps = Path("/proc/self/maps").read_text().splitlines()
    start = min(int(line.split("-")[0], 16) for line in maps if str(copy) in line)
    noise = np.random.default_rng(0)
    for channels, tokens in SHAPES:
        shape = BLOCKS, tokens, HEADS, channels
        rows = [noise.integers(0, 1 << 16, shape, dtype=np.uint16) for _ in range(2)]
        flat = [np.ascontiguousarray(one.reshape(-1, HEADS, channels)) for one in rows]
        place = start + found[_NAME.format(channels=channels)]
        cache = packed(place, *flat, tokens)
        by_head = [one.swapaxes(1, 2) for one in rows]
        wanted = [packed_keys(by_head[0]), packed_values(by_head[1])]
        if not all(np.array_equal(cache[:, :, n], wanted[n]) for n in (0, 1)):
            return _differs(channels, tokens, "tests/geometry/packed_tiles.py")
        planes = amx_planes(cache[:, :, 0], cache[:, :, 1], tokens, channels)
        everything = np.arange(BLOCKS)
        if not all(np.array_equal(planes[n][everything], rows[n]) for n in (0, 1)):
            return _differs(channels, tokens, "tests/lab/kinds.py")
        if np.array_equal(cache[:, :, 0], wanted[1]):  # the comparison can fail
            return _differs(channels, tokens, "itself")
        print(f"{channels} channels, blocks of {tokens} tokens: alike")
    return 0


def _differs(channels: int, tokens: int, where: str) -> int:
    print(f"{channels} channels, blocks of {tokens} tokens: packed otherwise than {where} does")
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
