"""The overlap of a peer's regions with our planes, worked out once for a peer; and how to read it.

Direct posts one run for every stretch that is contiguous on both sides. Staged posts one for every
remote block and copies each wanted byte once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from kvpatch.geometry.plane import Plane, extent_bytes
from kvpatch.geometry.plane_copies import Copy, contiguous_bytes, copies_between
from kvpatch.geometry.segments import Segments

ALIGNMENT_BYTES = 64
"""Spans in the buffer begin at multiples of it, so that a copy can move wide units."""

WORTH_A_RUN_BYTES = 16 * 1024
"""Reading as many unwanted bytes takes as long as posting another run (HOST_MEMORY)."""

Region = Sequence[Plane]
"""Planes of one layer and rank whose blocks lie inside one another: read together."""


class StagedSpan(NamedTuple):
    """A span of every block of one remote region, and how it lies in the staging buffer.

    Attributes:
        address: of the span's first byte in block 0.
        block_stride: from one remote block to the next.
        staged_bytes: from one block to the next in the buffer.
    """

    address: int
    block_stride: int
    span_bytes: int
    staged_bytes: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Overlap:
    """One remote region and our planes of its layer: the spans of a block that are wanted."""

    layer: str
    spans: tuple[StagedSpan, ...]

    @cached_property
    def shape(self) -> Hashable:
        """The same for two regions that differ in addresses only."""
        return tuple(
            (span.span_bytes, tuple(copy.strides for copy in span.copies)) for span in self.spans
        )

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(copy for span in self.spans for copy in span.copies)

    @cached_property
    def is_whole(self) -> bool:
        return any(copy.local.is_whole for copy in self.copies)

    @property
    def staged_bytes(self) -> int:
        """The least buffer that a staged copy can do with."""
        return max(span.staged_bytes for span in self.spans)


def overlaps_of(regions: Iterable[Region], local_planes: Sequence[Plane]) -> tuple[Overlap, ...]:
    """The overlaps of one rank's regions; those of which nothing is wanted are left out.

    Raises:
        UnplannableCopy: contents differ in width or item size.
    """
    ours: defaultdict[str, list[Plane]] = defaultdict(list)
    for plane in local_planes:
        ours[plane.layer].append(plane)
    found = []
    for region in regions:
        spans = _staged_spans(region, ours[region[0].layer])
        if spans:
            found.append(Overlap(region[0].layer, spans))
    return tuple(found)


def _staged_spans(region: Region, local_planes: Sequence[Plane]) -> tuple[StagedSpan, ...]:
    """Wanted bytes that lie close together are one span, with what is between them."""
    wanted: list[tuple[int, int, list[Copy]]] = []
    for copy in sorted(copies_between(region, local_planes), key=lambda copy: copy.remote_address):
        start = copy.remote_address
        axes = [(axis.size, axis.remote_stride) for axis in copy.strides.inner]
        end = start + extent_bytes((*copy.remote.token_axes, *axes), copy.strides.item_bytes)
        if wanted and start - wanted[-1][1] < WORTH_A_RUN_BYTES:
            first, last, copies = wanted[-1]
            wanted[-1] = first, max(last, end), [*copies, copy]
        else:
            wanted.append((start, end, [copy]))
    return tuple(
        StagedSpan(
            start,
            region[0].strides_bytes.block,
            end - start,
            -(-(end - start) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,
            tuple(copies),
        )
        for start, end, copies in wanted
    )


@dataclass(frozen=True)
class Costs:
    """The time that moving bytes takes on a machine.

    Attributes:
        run_seconds: of posting and completing one run, beside its bytes.
        wire_bytes_per_second: of runs, wherever they land.
        copy_bytes_per_second: of the strided copy out of the buffer.
    """

    run_seconds: float
    wire_bytes_per_second: float
    copy_bytes_per_second: float


#: Measured by experiments/bench_transfer.py and bench_runs.py on 2 busy cores of a server, NIXL
#: 1.5.1 over UCX between two processes (CMA), 4 NIXL threads as vLLM asks for, 128 MiB: 262,144
#: runs of 512 bytes take 2.6 us each; runs of 128 KiB move 2.5 to 3.4 GB/s; a chunk takes 0.3 ns a
#: byte more with its copy. Runs under about 8 KiB are staged (at 8 KiB direct 1.6, staged 1.1
#: GB/s; at 16 KiB 3.0 and 1.6).
HOST_MEMORY = Costs(2.6e-6, 3.5e9, 3e9)

#: Measured by the same on an NVIDIA H200, between two processes by cuda_ipc (docs/evidence/gpu.md):
#: runs of up to 64 KiB take 3.2 us each, those of 1 MiB move 100 GB/s. Placing itself is as fast as
#: memory; what counts is how long the host's thread takes to ask for it, some 0.5 ms for 16 MiB.
#: Runs under about 100 KiB are staged.
DEVICE_MEMORY = Costs(3.2e-6, 100e9, 30e9)


def is_direct(overlap: Overlap, segments: Segments, costs: Costs) -> bool:
    """True if a region is read faster in runs of its own than through a buffer."""
    wanted = runs = 0.0
    tokens = int(segments.tokens.sum())
    longest = int(segments.tokens.max())
    for copy in overlap.copies:
        size = copy.strides.item_bytes * prod(axis.size for axis in copy.strides.inner) * tokens
        wanted += size
        # As if all segments were as long as the longest: those at the ends are few.
        runs += size / contiguous_bytes(copy.strides, longest)
    blocks = 1 + int((segments.remote_block[1:] != segments.remote_block[:-1]).sum())
    landed = sum(span.span_bytes for span in overlap.spans) * blocks
    direct = runs * costs.run_seconds + wanted / costs.wire_bytes_per_second
    # One after the other: one thread does both, or on a device asks for both.
    landing = len(overlap.spans) * blocks * costs.run_seconds + landed / costs.wire_bytes_per_second
    return direct <= landing + wanted / costs.copy_bytes_per_second
