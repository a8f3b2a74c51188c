"""Staged copies, done on byte arrays, against the slow copy of one item at a time.

The copies out of the buffer are those that engines use: numpy, torch, and Triton's kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.overlap import HOST_MEMORY, is_direct, overlaps_of
from kvpatch.geometry.plane import HeadName, Plane, names_of_heads, planes_without
from kvpatch.geometry.segments import BlockList, Segments, pair_blocks
from kvpatch.geometry.staged_plan import Chunk, Share, plan_chunks
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.place import place_in_host_memory, place_on_device

from .interpreted_kernel import interpreted_kernel
from .planned import plan_copy
from .reference import execute, slow_copy
from .test_direct_plan import (
    DRAM,
    SOURCE,
    TARGET,
    Side,
    expected_of,
    head_ranges,
    noise,
    transfers,
)
from .whole_caches import CacheSizes, named_layout

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


@given(head_ranges(), st.sampled_from(["direct", "numpy"]))
@settings(max_examples=200, deadline=None)
def test_unlike_tensor_parallel_ranks(drawn: Any, way: str) -> None:
    """Each head is read once, from the first remote rank that holds it."""
    remotes, local, end = drawn
    expected, found = (bytearray(noise(2, local.total_bytes)) for _ in range(2))
    sources = [noise(10 + number, one.total_bytes) for number, one in enumerate(remotes)]
    written: set[int] = set()
    taken: frozenset[HeadName] = frozenset()
    for remote, source in zip(remotes, sources, strict=True):
        left = replace(local, planes=tuple(planes_without(local.planes, taken)))
        segments = pair_blocks(remote.blocks, local.blocks, 0, end)
        if way == "direct":
            plan = plan_copy(segments, remote.planes, left.planes)
            execute(plan, source, SOURCE, found, TARGET, written)
        else:
            do(chunks_of(remote, left, segments), source, found, way)
        taken |= names_of_heads(remote.planes)
    again = plan_copy(segments, remote.planes, local.planes)
    if way == "direct" and len(again):  # the count can fail: a head that comes again is noticed
        with pytest.raises(AssertionError):
            execute(again, source, SOURCE, bytearray(found), TARGET, written)
    for remote, source in zip(reversed(remotes), reversed(sources), strict=True):
        slow_copy(
            source, SOURCE, expected, TARGET, remote.planes, local.planes,
            remote.blocks, local.blocks, range(end),
        )  # fmt: skip
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


@pytest.mark.parametrize(
    ("layout", "changed", "expected"),
    [
        ("LBHNC", {}, True),
        ("LBNHC", {}, False),
        ("LBHNC", {"run_seconds": 1e-4}, False),
        ("LBNHC", {"run_seconds": 1e-8}, True),
        ("LBHNC", {"copy_bytes_per_second": 1e12}, False),
        ("LBNHC", {"copy_bytes_per_second": 1e8}, True),
    ],
)
def test_each_cost_decides_where_it_is_extreme(layout, changed, expected):
    """Whether blocks of HND are read directly out of another layout's."""
    sizes = CacheSizes(1, 8, 8, 16, 128, 2)
    remote = named_layout(layout).planes(sizes, 0, DRAM)
    local = named_layout("LBHNC").planes(replace(sizes, block_tokens=32, blocks=4), 0, DRAM)
    (overlap,) = overlaps_of([remote], local)
    segments = pair_blocks(BlockList(range(8), 16), BlockList(range(4), 32), 0, 128)
    assert is_direct(overlap, segments, replace(HOST_MEMORY, **changed)) is expected
