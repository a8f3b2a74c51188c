"""Segments of many kinds, cut into pieces of one length that are one kind.

Blocks of 96 tokens that become blocks of 64 are cut in four ways, and each is a copy of its own.
What a copy costs a device is its launch, so that there they are copied in pieces of 32 tokens: a
number says where each lies on both sides, and the offsets in blocks are part of it.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import NamedTuple

import numpy as np

from kvpatch.geometry.plane_copies import CopyAxis
from kvpatch.geometry.segments import Int64Array, Segments
from kvpatch.geometry.staged_plan import Placement

#: Of a segment at most: the device looks each of them up.
_MOST_PIECES = 4


class _Cut(NamedTuple):
    """Segments as pieces.

    Attributes:
        pieces: which numbers alone tell apart.
        block: how far the numbers are apart.
        rest: what is no whole number of pieces; None for nothing.
    """

    pieces: Segments
    block: CopyAxis
    rest: Segments | None


class EvenPieces:
    """Of a chunk's placements; segments that several of them share are cut once."""

    def __init__(self) -> None:
        #: By segments, which placements hold, and by how blocks and tokens are strided.
        self._cuts: dict[tuple[int, CopyAxis, CopyAxis], _Cut | None] = {}

    def of(self, placement: Placement) -> tuple[Placement, ...]:
        """The same copies in fewer kinds of segments, where a length divides them."""
        segments, strides = placement.segments, placement.strides
        key = id(segments), strides.block, strides.token
        if key not in self._cuts:
            self._cuts[key] = _cut(segments, strides.block, strides.token)
        cut = self._cuts[key]
        if cut is None:
            return (placement,)
        pieces = replace(placement, segments=cut.pieces, strides=strides._replace(block=cut.block))
        return (pieces,) if cut.rest is None else (pieces, replace(placement, segments=cut.rest))


def _cut(segments: Segments, block: CopyAxis, token: CopyAxis) -> _Cut | None:
    """The pieces; None where they would be no fewer copies."""
    kinds = len(segments.kinds)
    if kinds == 1:
        return None
    # The last token of a request is anywhere, so that the last segment has any length.
    borders = (segments.remote_offset, segments.local_offset, segments.tokens[:-1])
    tokens = int(np.gcd.reduce(np.concatenate(borders)))
    is_left = bool(segments.tokens[-1] % tokens)
    even = _rows(segments, slice(0, -1 if is_left else None))
    if int(even.tokens.sum()) > _MOST_PIECES * tokens * len(even):
        return None
    counts = even.tokens // tokens
    numbers, steps = [], []
    for blocks, offsets, block_stride, token_stride in (
        (even.remote_block, even.remote_offset, block.remote_stride, token.remote_stride),
        (even.local_block, even.local_offset, block.local_stride, token.local_stride),
    ):
        piece_stride = tokens * token_stride
        step = gcd(block_stride, piece_stride) or 1
        first = blocks * (block_stride // step) + offsets // tokens * (piece_stride // step)
        numbers.append(_counted_on(first, counts, piece_stride // step))
        steps.append(step)
    begins = np.zeros_like(numbers[0])
    pieces = Segments(numbers[0], begins, numbers[1], begins, np.full_like(begins, tokens))
    # What does not lie evenly in the buffer is gathered before it is copied.
    if 1 + is_left + (pieces.kinds[0].remote.steps is None) >= kinds:
        return None
    apart = block._replace(remote_stride=steps[0], local_stride=steps[1])
    return _Cut(pieces, apart, _rows(segments, slice(-1, None)) if is_left else None)


def _counted_on(first: Int64Array, counts: Int64Array, step: int) -> Int64Array:
    """Of each first number as many as are counted, ``step`` apart."""
    ends = np.cumsum(counts)
    at = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    found: Int64Array = np.repeat(first, counts) + at * step
    return found


def _rows(segments: Segments, which: slice) -> Segments:
    return Segments(
        segments.remote_block[which],
        segments.remote_offset[which],
        segments.local_block[which],
        segments.local_offset[which],
        segments.tokens[which],
    )
