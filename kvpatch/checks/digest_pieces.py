"""Parts of a cache of which digests are made at once, and their sums by torch or by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpatch.checks.digests import HALF_BITS, LOW_HALF, WORD_BYTES, UInt64Array
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import Int64Array
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.plane_bytes import in_units, uploaded

if TYPE_CHECKING:
    import torch

#: Of the cache at once on the host, for which a core's own cache has room.
_HOST_SLICE_BYTES = 512 * 1024
_WIDEST_BYTES = 8


class Alike:
    """Planes that differ only in where their blocks lie, and how a block of theirs is walked.

    Attributes:
        row_bytes: the bytes of one token of one head.
        block_bytes: the bytes of one block of one plane.
        first: the lowest address of a plane.
        step: bytes from one block number to the next.
        unit: bytes that all distances are multiples of.
        axes: (size, stride in units) of heads, tokens, channels and contiguous units.
    """

    def __init__(self, memory: Bytes, planes: Sequence[Plane]) -> None:
        self.memory, self.planes, plane = memory, planes, planes[0]
        self.row_bytes = plane.counts.channels * plane.item_bytes
        self.block_bytes = plane.counts.heads * plane.counts.block_tokens * self.row_bytes
        self.first = min(plane.address for plane in planes)
        apart = (plane.address - self.first for plane in planes)
        # Every distance between two blocks is a multiple of it.
        self.step = gcd(*apart, *(one.strides_bytes.block for one in planes)) or _WIDEST_BYTES
        _, *outer, (channels, stride) = plane.axes
        if channels > 1 and stride != plane.item_bytes:
            outer, piece = [*outer, (channels, stride)], plane.item_bytes
        else:
            piece = channels * plane.item_bytes
        offsets = memory.address, self.first - memory.address, self.step
        unit = gcd(_WIDEST_BYTES, *offsets, piece, *(stride for _, stride in outer))
        self.unit, self.axes = unit, [*((n, stride // unit) for n, stride in outer)]
        self.axes.append((piece // unit, 1))

    def numbers(self, block_ids: Int64Array) -> Int64Array:
        """[plane, block] in steps from the first."""
        apart = [(plane.address - self.first) // self.step for plane in self.planes]
        strides = [plane.strides_bytes.block // self.step for plane in self.planes]
        return np.array(apart)[:, None] + np.array(strides)[:, None] * block_ids

    def view(self, end: int) -> torch.Tensor:
        """[number, head, token, units] of memory, up to the last number that is asked for.

        Of tiled planes tokens and units are several axes each.
        """
        sizes, strides = zip(*self.axes, strict=True)
        memory, unit = self.memory.memory, self.unit
        start = memory.storage_offset() + self.first - self.memory.address
        return in_units(memory, unit).as_strided(
            (end, *sizes), (self.step // unit, *strides), start // unit
        )


class DigestPiece(NamedTuple):
    """The part of the cache that is read at once.

    Attributes:
        words: the weights of a row's words.
        rows: the weights of these rows; a token has one row or several.
        borders: the borders of the ranges, in rows of the piece.
    """

    alike: Alike
    planes: slice
    ranges: slice
    numbers: Int64Array
    words: UInt64Array
    rows: UInt64Array
    borders: Int64Array

    def sums_by_torch(self) -> torch.Tensor:
        """[plane, head, range], on the device, in its current stream.

        By several operations of torch's, or of numpy's on the host.
        """
        counts, device = self.alike.planes[0].counts, self.alike.memory.memory.device
        view = self.alike.view(int(self.numbers.max()) + 1)
        sent = self.words.view(np.int64), self.rows.view(np.int64), self.borders, self.numbers
        words, rows, borders, numbers = uploaded(sent, device)
        if device.type == "cpu":
            sums = host_sums(view, self.numbers, self.words, counts.block_tokens)
        else:
            sums = device_sums(view, numbers, words, counts.block_tokens)
        return _range_sums(sums.view(*self.numbers.shape, *sums.shape[1:]), rows, borders)


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
    view: torch.Tensor, numbers: Int64Array, weights: UInt64Array, tokens: int
) -> torch.Tensor:
    """Computes :func:`device_sums` on the host, in pieces that fit into a core's own cache."""
    import torch

    at_once = max(1, _HOST_SLICE_BYTES // (prod(view.shape[1:]) * view.element_size()))
    wanted, cache = numbers.reshape(-1), view.numpy()
    sums = [
        np.einsum(  # to uint64: widened by their sign, and what goes beyond 64 bits is dropped
            "nhtrw,w->nhtr",
            _words(cache[wanted[start : start + at_once]], weights.size, tokens),
            weights,
            dtype=np.uint64,
            casting="unsafe",
        )
        for start in range(0, wanted.size, at_once)
    ]
    return torch.from_numpy(np.concatenate(sums).view(np.int64)).flatten(2)


def _words(rows: npt.NDArray[Any], words: int, tokens: int) -> npt.NDArray[np.int32]:
    """[number, head, token, row, word]."""
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
