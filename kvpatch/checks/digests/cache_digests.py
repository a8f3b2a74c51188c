"""Digests of cached tokens, made where the cache lies: a few operations on many layers at once.

The numbers are those of ``digest_weights.py``. Planes that differ only in where they lie are read
together, some MiB at a time: gathered block by block, multiplied as words of 32 bits, and added up.
On the host numpy's einsum does the last two in one pass; a device has no product of whole-number
matrices and does them in two operations.

Tried for the first sum, on one core with AVX-512, as a multiple of what a plain copy of the bytes
takes, without the gather: numpy's einsum, which widens words as it goes, 2.1 (4 MiB) to 5.6 (256
KiB, where a copy stays in the core's cache); words times weights in ``int64`` and their sum by
torch 5 to 24; ``int64`` matrix products 4 to 9; ``float64`` products that stay below 2**53 3 to 5
for weights of 15 bits, and 10 to 17 for two of 26 bits to each half of a word.

Who calls it sees to it that the blocks are the request's own until the digests are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpatch.checks.digests.digest_weights import (
    HALF_BITS,
    LOW_HALF,
    WORD_BYTES,
    UInt64Array,
    Weights,
    rows_of,
)
from kvpatch.checks.digests.digests import Digests, Extent, Name, ranges_of
from kvpatch.core.errors import DigestsRefused
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList, Int64Array
from kvpatch.transfer.one_memory import Bytes, one_memory, storage_of
from kvpatch.transfer.plane_bytes import in_units, uploaded

if TYPE_CHECKING:
    import torch

#: Of the cache at once; what is made of it takes twice as much more on a device.
SLICE_BYTES = 32 * 1024**2
#: Of the cache at once on the host, for which a core's own cache has room.
_HOST_SLICE_BYTES = 512 * 1024
_WIDEST_BYTES = 8


class CacheDigests:
    """The maker of digests for the layers of one block table.

    Args:
        memories: the memory that each layer's planes lie in (:func:`memories_of`).
        planes: the planes whose blocks a request's block list counts. Content that each rank has
            of its own, such as recurrent state, has the rank's number as its head.
        range_tokens: the tokens of a range; a mismatch is located to a range.
    """

    def __init__(
        self, memories: Mapping[str, Bytes], planes: Sequence[Plane], range_tokens: int
    ) -> None:
        self._range_tokens = range_tokens
        kinds: dict[object, list[Plane]] = {}
        for plane in planes:
            shape = plane.strides_bytes[1:], plane.counts[1:], plane.tile
            kind = shape, plane.item_bytes, plane.is_whole
            kinds.setdefault((memories[plane.layer].address, kind), []).append(plane)
        self.alike = [Alike(memories[of[0].layer], tuple(of)) for of in kinds.values()]

    def begin(
        self, blocks: BlockList, first_token: int, end_token: int, weights: Weights
    ) -> PendingDigests:
        """Starts the digests of some tokens on the device, in its current stream.

        A block that is a whole belongs to the range that its first token lies in.

        Raises:
            DigestsRefused: the blocks are not of these planes, or have no room for the tokens.
        """
        ranges = ranges_of(first_token, end_token, self._range_tokens)
        if not ranges or first_token < blocks.first_token or end_token > blocks.end_token:
            raise DigestsRefused(
                f"expected some tokens of {blocks.first_token} to {blocks.end_token}, found "
                f"{first_token} to {end_token}"
            )
        borders = np.array([first_token, *(end for _, end in ranges)]) - blocks.first_token
        parts = tuple(
            (alike.planes, _cells(alike, _rows_in(alike.planes, blocks, borders), weights))
            for alike in self.alike
        )
        return PendingDigests(weights.seed, ranges, parts)


def memories_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Bytes]:
    """Returns each layer's memory: one range for all if possible, so that one pass reads them."""
    everything = one_memory(tensors.values())
    return {layer: everything or storage_of(tensor) for layer, tensor in tensors.items()}


class PendingDigests(NamedTuple):
    """Digests that a device may still be making: [plane, head, range] of planes alike."""

    seed: bytes
    ranges: tuple[Extent, ...]
    parts: tuple[tuple[tuple[Plane, ...], torch.Tensor], ...]

    def read(self) -> Digests:
        """The numbers; waits for the device."""
        import torch

        flat = torch.cat([cells.flatten() for _, cells in self.parts]).cpu().numpy()
        found: dict[Name, dict[int, UInt64Array]] = {}
        for planes, cells in self.parts:
            numbers, flat = flat[: cells.numel()], flat[cells.numel() :]
            of_planes = numbers.view(np.uint64).reshape(cells.shape)
            for plane, of_heads in zip(planes, of_planes, strict=True):
                heads = found.setdefault((plane.layer, plane.content), {})
                heads.update(enumerate(of_heads, plane.first_head))
        return Digests(self.seed, self.ranges, found)


@dataclass(frozen=True)
class Alike:
    """Planes that differ only in where their blocks lie, and how a block of theirs is walked."""

    memory: Bytes
    planes: tuple[Plane, ...]

    @cached_property
    def row_bytes(self) -> int:
        """Returns the bytes of one token of one head."""
        return self.planes[0].counts.channels * self.planes[0].item_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Returns the bytes of one block of one plane."""
        counts = self.planes[0].counts
        return counts.heads * counts.block_tokens * self.row_bytes

    @cached_property
    def _first(self) -> int:
        return min(plane.address for plane in self.planes)

    @cached_property
    def _step(self) -> int:
        """Returns a size that every distance between two blocks is a multiple of."""
        apart = (plane.address - self._first for plane in self.planes)
        strides = (plane.strides_bytes.block for plane in self.planes)
        return gcd(*apart, *strides) or _WIDEST_BYTES

    @cached_property
    def _axes(self) -> tuple[tuple[int, int], ...]:
        """(size, stride in bytes) of head, token and a row's pieces, which are bytes or items."""
        plane = self.planes[0]
        _, *outer, (channels, apart) = plane.axes
        if channels == 1 or apart == plane.item_bytes:
            return (*outer, (channels * plane.item_bytes, 1))
        return (*outer, (channels, apart), (plane.item_bytes, 1))

    @cached_property
    def _unit(self) -> int:
        """The widest that all of it is a whole number of."""
        *outer, (piece, _) = self._axes
        offsets = self.memory.address, self._first - self.memory.address, self._step
        return gcd(_WIDEST_BYTES, *offsets, piece, *(stride for _, stride in outer))

    def numbers(self, block_ids: Int64Array) -> Int64Array:
        """[plane, block] in steps from the first."""
        apart = [(plane.address - self._first) // self._step for plane in self.planes]
        strides = [plane.strides_bytes.block // self._step for plane in self.planes]
        return np.array(apart)[:, None] + np.array(strides)[:, None] * block_ids

    def view(self, end: int) -> torch.Tensor:
        """[number, head, token, units] of memory, up to the last number that is asked for.

        Of tiled planes tokens and units are several axes each.
        """
        unit = self._unit
        *outer, (piece, _) = self._axes
        return in_units(self.memory.memory, unit).as_strided(
            (end, *(size for size, _ in outer), piece // unit),
            (self._step // unit, *(stride // unit for _, stride in outer), 1),
            (self.memory.memory.storage_offset() + self._first - self.memory.address) // unit,
        )


class _Rows(NamedTuple):
    """The rows of some tokens in the blocks that hold them; a token has one row or several.

    Attributes:
        ids: of the blocks.
        first_token: of the first of them.
        borders: of the ranges, in tokens behind that one.
    """

    ids: Int64Array
    first_token: int
    borders: Int64Array


def _rows_in(planes: Sequence[Plane], blocks: BlockList, borders: Int64Array) -> _Rows:
    """The blocks that hold what lies between the borders, which count from the first block's."""
    size, available = blocks.block_tokens, min(plane.counts.blocks for plane in planes)
    if planes[0].is_whole:
        borders = -(-borders // size) * size
    first, end = int(borders[0]) // size, -(-int(borders[-1]) // size)
    ids = blocks.block_ids[first:end]
    if planes[0].counts.block_tokens != size or ids.max(initial=0) >= available:
        raise DigestsRefused(
            f"expected blocks of {planes[0].counts.block_tokens} tokens below {available}, found "
            f"blocks of {size} up to {ids.max(initial=0)}"
        )
    return _Rows(ids, blocks.first_token + first * size, borders - first * size)


class _Slice(NamedTuple):
    """The part of the cache that is read at once.

    Attributes:
        planes: which planes.
        numbers: the numbers of their blocks.
        rows: which of the rows these are.
        ranges: which of the ranges these are.
        borders: the borders of the ranges, in rows of the slice.
    """

    planes: slice
    numbers: Int64Array
    rows: slice
    ranges: slice
    borders: Int64Array


def _slices(alike: Alike, wanted: _Rows, rows_per_token: int) -> Iterator[_Slice]:
    numbers = alike.numbers(wanted.ids)
    planes, blocks = numbers.shape
    per_block = alike.planes[0].counts.block_tokens * rows_per_token
    blocks_at_once = min(blocks, max(1, SLICE_BYTES // alike.block_bytes))
    planes_at_once = max(1, SLICE_BYTES // (blocks_at_once * alike.block_bytes))
    for block in range(0, blocks, blocks_at_once):
        rows = slice(block * per_block, min(blocks, block + blocks_at_once) * per_block)
        borders = np.clip(wanted.borders * rows_per_token, rows.start, rows.stop)
        filled = np.flatnonzero(np.diff(borders))
        ranges = slice(int(filled[0]), int(filled[-1]) + 1)
        for plane in range(0, planes, planes_at_once):
            of_planes = slice(plane, plane + planes_at_once)
            yield _Slice(
                of_planes,
                numbers[of_planes, block : block + blocks_at_once],
                rows,
                ranges,
                borders[ranges.start : ranges.stop + 1] - rows.start,
            )


def _cells(alike: Alike, wanted: _Rows, weights: Weights) -> torch.Tensor:
    """[plane, head, range]."""
    import torch

    counts, device = alike.planes[0].counts, alike.memory.memory.device
    shape = (len(alike.planes), counts.heads, wanted.borders.size - 1)
    cells = torch.zeros(shape, dtype=torch.int64, device=device)
    if not wanted.ids.size:
        return cells
    rows_per_token, words = rows_of(alike.row_bytes)
    first = wanted.first_token * rows_per_token
    end = first + wanted.ids.size * counts.block_tokens * rows_per_token
    of_words, of_rows = weights.words(words), weights.rows(first, end)
    slices = list(_slices(alike, wanted, rows_per_token))
    view = alike.view(max(int(one.numbers.max()) for one in slices) + 1)
    sent = [of_words.view(np.int64), of_rows.view(np.int64)]
    sent += [one.borders for one in slices]
    sent += [] if device.type == "cpu" else [one.numbers for one in slices]
    on_device = uploaded(sent, device)
    for at, one in enumerate(slices):
        shape = (*one.numbers.shape, counts.heads, counts.block_tokens * rows_per_token)
        if device.type == "cpu":
            found = host_sums(view.numpy(), one.numbers, of_words, counts.block_tokens)
            sums = torch.from_numpy(found.view(np.int64))
        else:
            numbers = on_device[2 + len(slices) + at]
            sums = device_sums(view, numbers, on_device[0], counts.block_tokens)
        of_ranges = _range_sums(sums.view(shape), on_device[1][:, one.rows], on_device[2 + at])
        cells[one.planes, :, one.ranges] += of_ranges
    return cells


def device_sums(
    view: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor, tokens: int
) -> torch.Tensor:
    """[number, head, row] of the words' sums.

    Args:
        tokens: of a number.
    """
    import torch
    from torch.nn.functional import pad

    found = view.index_select(0, numbers.flatten())
    rows = found.reshape(*found.shape[:2], tokens, -1)
    missing = -rows.shape[3] * rows.element_size() % (weights.numel() * WORD_BYTES)
    if missing:
        rows = pad(rows.view(torch.uint8), (0, missing))
    words = rows.view(torch.int32).unflatten(3, (-1, weights.numel()))
    return (words * weights).sum(-1).flatten(2)


def host_sums(
    view: npt.NDArray[Any], numbers: Int64Array, weights: UInt64Array, tokens: int
) -> UInt64Array:
    """Computes :func:`device_sums` on the host, in pieces that fit into a core's own cache."""
    at_once = max(1, _HOST_SLICE_BYTES // (prod(view.shape[1:]) * view.itemsize))
    wanted = numbers.reshape(-1)
    sums = [
        np.einsum(  # to uint64: widened by their sign, and what goes beyond 64 bits is dropped
            "nhtrw,w->nhtr",
            _host_words(view, wanted[start : start + at_once], weights.size, tokens),
            weights,
            dtype=np.uint64,
            casting="unsafe",
        )
        for start in range(0, wanted.size, at_once)
    ]
    found: UInt64Array = np.concatenate(sums)
    return found


def _host_words(
    view: npt.NDArray[Any], numbers: Int64Array, words: int, tokens: int
) -> npt.NDArray[np.int32]:
    """[number, head, token, row, word]."""
    rows = view[numbers]
    rows = rows.reshape(*rows.shape[:2], tokens, -1)
    if rows.strides[-1] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    raw = rows.view(np.uint8)
    missing = -raw.shape[-1] % (words * WORD_BYTES)
    if missing:
        raw = np.pad(raw, ((0, 0), (0, 0), (0, 0), (0, missing)))
    found: npt.NDArray[np.int32] = raw.view(np.int32).reshape(*rows.shape[:3], -1, words)
    return found


def _range_sums(sums: torch.Tensor, weights: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """[plane, head, range] of rows [plane, block, head, row of the block].

    Args:
        weights: [half, row of all blocks].
        borders: of the ranges, in rows of all blocks.
    """
    import torch
    from torch.nn.functional import pad

    low, high = weights.view(2, sums.shape[1], 1, sums.shape[3])
    weighed = torch.addcmul((sums & LOW_HALF) * low, sums >> HALF_BITS, high)
    up_to = pad(weighed.transpose(1, 2).flatten(2).cumsum(2), (1, 0)).index_select(2, borders)
    return up_to[..., 1:] - up_to[..., :-1]
