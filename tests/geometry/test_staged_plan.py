"""Staged copies, done on byte arrays, against the slow copy of one item at a time.

The copies out of the buffer are those that engines use: numpy, torch, and Triton's kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import Segments, pair_blocks
from kvpatch.geometry.staged_plan import Chunk, Share, plan_chunks
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.place import place_in_host_memory, place_on_device

from .interpreted_kernel import interpreted_kernel
from .reference import slow_copy
from .test_direct_plan import SOURCE, TARGET, Side, expected_of, head_ranges, noise, transfers

pytestmark = pytest.mark.geometry

WHOLE = 1 << 30


def regions_of(planes: Sequence[Plane], together: bool) -> list[list[Plane]]:
    """Each layer's keys and values as one region, or each as its own."""
    found: defaultdict[tuple[str, object], list[Plane]] = defaultdict(list)
    for plane in planes:
        found[plane.layer, None if together else plane.content].append(plane)
    return list(found.values())


def chunks_of(
    remote: Side, local: Side, segments: Segments, together: bool = True, limit: int = WHOLE
) -> list[Chunk]:
    overlaps = overlaps_of(regions_of(remote.planes, together), local.planes)
    return list(plan_chunks([Share(segments, overlaps)], limit))


def do(chunks: Sequence[Chunk], source: bytes, target: bytearray, way: str) -> None:
    """Reads each chunk into a buffer of noise, then places it."""
    for number, planned in enumerate(chunks):
        buffer = bytearray(noise(100 + number, planned.buffer_bytes))
        landed: set[int] = set()
        for remote, offset, length in zip(
            planned.remote_address.tolist(),
            planned.staging_offset.tolist(),
            planned.length.tolist(),
            strict=True,
        ):
            start = remote - SOURCE
            assert length > 0
            assert start >= 0 and start + length <= len(source)
            assert offset >= 0 and offset + length <= len(buffer)
            assert landed.isdisjoint(range(offset, offset + length))
            landed.update(range(offset, offset + length))
            buffer[offset : offset + length] = source[start : start + length]
        staging = np.frombuffer(buffer, dtype=np.uint8)
        cache = np.frombuffer(target, dtype=np.uint8)
        if way == "numpy":
            for placement in planned.placements:
                place_in_host_memory(staging, cache, TARGET, placement)
        else:
            # As in a pool: a part of a larger buffer, behind other chunks.
            pool = torch.from_numpy(np.frombuffer(noise(9, 64) + bytes(buffer), np.uint8).copy())
            into = Bytes(TARGET, torch.from_numpy(cache))
            is_kernel = way == "triton"
            place = interpreted_kernel().place_by_kernel if is_kernel else place_on_device
            place(pool[64:], [(into, placement) for placement in planned.placements])


@given(transfers(), st.booleans(), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_any_two_geometries_in_rounds(drawn: Any, together: bool, more_blocks: int) -> None:
    """Whatever the size of the chunks: every item in its place, nothing else touched."""
    remote, local, first, end = drawn
    source, expected = expected_of(remote, local, range(first, end))
    segments = pair_blocks(remote.blocks, local.blocks, first, end)
    overlaps = overlaps_of(regions_of(remote.planes, together), local.planes)
    least = max(overlap.staged_bytes for overlap in overlaps)
    for limit in (least + more_blocks * 64, WHOLE):
        chunks = chunks_of(remote, local, segments, together, limit)
        assert all(planned.buffer_bytes <= limit for planned in chunks)
        for way in ("numpy", "torch", "triton"):
            found = bytearray(noise(2, local.total_bytes))
            do(chunks, source, found, way)
            assert found == expected, way
    if first < end:  # the comparison can fail: a copy that is not done is noticed
        assert noise(2, local.total_bytes) != bytes(expected)


@given(head_ranges())
@settings(max_examples=100, deadline=None)
def test_unlike_tensor_parallel_ranks_in_rounds(drawn: Any) -> None:
    remotes, locals_, end = drawn
    for local in locals_:
        expected, found = (bytearray(noise(2, local.total_bytes)) for _ in range(2))
        for remote in remotes:
            source = noise(1, remote.total_bytes)
            slow_copy(
                source, SOURCE, expected, TARGET, remote.planes, local.planes,
                remote.blocks, local.blocks, range(end),
            )  # fmt: skip
            segments = pair_blocks(remote.blocks, local.blocks, 0, end)
            do(chunks_of(remote, local, segments), source, found, "numpy")
        assert found == expected


@given(transfers(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_segment_outside_a_plane_is_refused(drawn: Any, data: Any) -> None:
    remote, local, first, end = drawn
    if first == end:
        return
    segments = pair_blocks(remote.blocks, local.blocks, first, end)
    column = data.draw(st.sampled_from(["remote_block", "local_block", "local_offset"]))
    columns = {name: getattr(segments, name).copy() for name in vars(segments)}
    columns[column][-1] = 1000
    with pytest.raises(UnplannableCopy, match="found blocks up to"):
        chunks_of(remote, local, Segments(**columns))
