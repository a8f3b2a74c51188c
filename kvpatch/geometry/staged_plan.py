"""Chunks of a staged copy: whole remote blocks land in a small buffer, then are placed.

Where heads, tokens or channels lie in another order on the two sides, the bytes that
are contiguous on both are few, and each run of them would cost the network a
descriptor. A staged copy reads each remote block in one run and leaves the reordering
to a strided copy in local memory. A chunk is as much of it as fits into the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvpatch.geometry.direct_plan import Plan
from kvpatch.geometry.overlap import Overlap, StagedSpan
from kvpatch.geometry.plane_copies import Copy, CopyStrides, check_reach, copies_in_tiles, reach_of
from kvpatch.geometry.segments import Int64Array, Segments


@dataclass(frozen=True)
class Share:
    """A cache group's part of a request: which tokens, through which overlaps."""

    segments: Segments
    overlaps: tuple[Overlap, ...]


@dataclass(frozen=True)
class Placement:
    """A strided copy of some tokens out of a chunk's buffer into one layer's cache.

    Attributes:
        staging_offset: of the copy's first item, from the start of the chunk's buffer.
        local_address: of its first item in the cache.
        strides: those of the buffer stand as the remote ones.
        segments: ``remote_block`` counts the spans in the buffer.
    """

    layer: str
    staging_offset: int
    local_address: int
    strides: CopyStrides
    segments: Segments


@dataclass(frozen=True)
class Chunk:
    """Runs of remote bytes to read into a buffer, and what to do with them there.

    Attributes:
        remote_address: where each run is read.
        staging_offset: where it lands, from the start of the buffer.
        buffer_bytes: the size of the buffer that the chunk needs.
    """

    remote_address: Int64Array
    staging_offset: Int64Array
    length: Int64Array
    buffer_bytes: int
    placements: tuple[Placement, ...]


def plan_chunks(shares: Sequence[Share], chunk_bytes: int) -> Iterator[Chunk]:
    """Yields chunks that together copy the shares, each within ``chunk_bytes`` of buffer.

    A chunk takes a block at least, however large. Every wanted token is in exactly one chunk. A
    chunk takes whole blocks, so it reads what lies between the wanted bytes of a block too, and
    nothing outside the planes.

    Raises:
        UnplannableCopy: a segment reaches outside a plane.
    """
    parts: list[Chunk] = []
    used = 0
    for share in shares:
        if not len(share.segments):
            continue
        blocks = _Blocks(share.segments)
        reach = reach_of(share.segments)
        for span in (span for overlap in share.overlaps for span in overlap.spans):
            for copy in span.copies:
                check_reach(reach, copy)
            copies = _in_buffer(span)
            first = 0
            while first < blocks.count:
                # In equal parts, so that all regions have the same ones: each is worked out once.
                left = blocks.count - first
                count = -(-left // -(-left // max(1, chunk_bytes // span.staged_bytes)))
                if parts and used + count * span.staged_bytes > chunk_bytes:
                    yield _joined(parts)
                    parts, used = [], 0
                    continue
                parts.append(_part(span, copies, blocks, first, first + count, used))
                used += count * span.staged_bytes
                first += count
    if parts:
        yield _joined(parts)


class _Blocks:
    """A share's segments by the remote block that they lie in.

    What is worked out of some blocks is kept: all regions of one shape ask for the same.
    """

    def __init__(self, segments: Segments) -> None:
        begins = np.empty(len(segments), dtype=np.bool_)
        begins[0] = True
        # A list may name a block twice in a row: the offsets tell that it starts again.
        np.not_equal(segments.remote_block[1:], segments.remote_block[:-1], out=begins[1:])
        begins[1:] |= segments.remote_offset[1:] <= segments.remote_offset[:-1]
        first = np.flatnonzero(begins)
        self._segments = segments
        self._block = segments.remote_block[first]
        #: One number more than there are blocks.
        self._first_segment = np.append(first, len(segments))
        self._parts: dict[tuple[int, int], Segments] = {}
        self._runs: dict[tuple[int, ...], Plan] = {}

    @property
    def count(self) -> int:
        return int(self._block.size)

    def part(self, first: int, end: int) -> Segments:
        """The segments of blocks ``first`` to ``end``, which count from 0 in it."""
        found = self._parts.get((first, end))
        if found is None:
            bounds = self._first_segment[first : end + 1]
            rows = slice(int(bounds[0]), int(bounds[-1]))
            s = self._segments
            found = self._parts[first, end] = Segments(
                np.repeat(np.arange(end - first, dtype=np.int64), np.diff(bounds)),
                s.remote_offset[rows],
                s.local_block[rows],
                s.local_offset[rows],
                s.tokens[rows],
            )
        return found

    def runs(self, first: int, end: int, span: StagedSpan) -> Plan:
        """Returns the bytes to read of blocks ``first`` to ``end``.

        Addresses count from a region's, and from the blocks' place in the buffer: they are the same
        for all regions of one shape.
        """
        key = (first, end, span.block_stride, span.span_bytes, span.staged_bytes)
        found = self._runs.get(key)
        if found is None:
            remote = self._block[first:end] * span.block_stride
            starts = np.empty(end - first, dtype=np.bool_)
            starts[0] = True
            # Blocks in a row are one run where they touch in the buffer too.
            np.not_equal(remote[:-1] + span.span_bytes, remote[1:], out=starts[1:])
            starts[1:] |= span.span_bytes != span.staged_bytes
            begins = np.flatnonzero(starts)
            blocks = np.diff(begins, append=end - first)
            found = Plan(remote[begins], begins * span.staged_bytes, blocks * span.span_bytes)
            self._runs[key] = found
        return found


def _in_buffer(span: StagedSpan) -> tuple[Copy, ...]:
    """The copies of a span once its blocks lie in a buffer that begins at address 0."""
    return tuple(
        replace(
            copy,
            remote_address=copy.remote_address - span.address,
            strides=copy.strides._replace(
                block=copy.strides.block._replace(remote_stride=span.staged_bytes)
            ),
        )
        for copy in span.copies
    )


def _part(
    span: StagedSpan,
    copies: tuple[Copy, ...],
    blocks: _Blocks,
    first: int,
    end: int,
    at: int,
) -> Chunk:
    """Blocks ``first`` to ``end`` of a region, from byte ``at`` of the buffer on."""
    runs = blocks.runs(first, end, span)
    segments = blocks.part(first, end)
    placements = tuple(
        Placement(
            layer=one.local.layer,
            staging_offset=at + one.remote_address,
            local_address=one.local_address,
            strides=one.strides,
            segments=some,
        )
        for copy in copies
        for some, one in copies_in_tiles(segments, copy)
    )
    return Chunk(
        span.address + runs.remote_address,
        at + runs.local_address,
        runs.length,
        at + (end - first) * span.staged_bytes,
        placements,
    )


def _joined(parts: Sequence[Chunk]) -> Chunk:
    # Neighbours of two regions may belong to two registrations: never one run.
    return Chunk(
        np.concatenate([part.remote_address for part in parts]),
        np.concatenate([part.staging_offset for part in parts]),
        np.concatenate([part.length for part in parts]),
        parts[-1].buffer_bytes,
        tuple(placement for part in parts for placement in part.placements),
    )
