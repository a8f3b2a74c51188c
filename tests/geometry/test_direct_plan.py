"""Plans, done on byte arrays, against the slow copy of one item at a time; and parts of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.direct_plan import Plan, plan_parts
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides
from kvpatch.geometry.plane_copies import copies_between
from kvpatch.geometry.segments import BlockList, Segments, pair_blocks, uncovered_tail
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.plane_bytes import zero_tokens
from kvpatch.transfer.staged_read import SPREAD_RUNS, runs_of_a_post

from .planned import plan_copy, plan_runs
from .reference import execute, slow_copy, slow_zero
from .whole_caches import LAYOUTS, CacheSizes, named_layout

pytestmark = pytest.mark.geometry

DRAM = Memory("DRAM")
SOURCE, TARGET = 1 << 20, 1 << 24
"""Where the two byte arrays are said to lie."""


@dataclass(frozen=True)
class Side:
    """One engine's cache with a margin on both ends, and a request's blocks in it."""

    planes: tuple[Plane, ...]
    blocks: BlockList
    total_bytes: int


def noise(seed: int, count: int) -> bytes:
    """Bytes without a zero among them, so that zeroing shows."""
    return np.random.default_rng(seed).integers(1, 256, count, dtype=np.uint8).tobytes()


@st.composite
def side(
    draw: st.DrawFn,
    address: int,
    sizes: CacheSizes,
    first_token: int,
    end_token: int,
    first_head: int = 0,
) -> Side:
    """Any named layout, block size and block ids that hold the tokens."""
    layout = named_layout(draw(st.sampled_from(sorted(LAYOUTS))))
    block_tokens = draw(st.integers(1, 7))
    start = draw(st.integers(0, first_token))
    used = -(-(end_token - start) // block_tokens)
    count = used + draw(st.integers(1, 2))
    ids = draw(st.one_of(st.just(range(count)), st.permutations(range(count))))[:used]
    far: int | None = None
    if layout.axes.index("kv") < layout.axes.index("block") and len(sizes.contents) == 2:
        half = count * sizes.heads * block_tokens * sizes.channels * sizes.item_bytes
        far = draw(st.sampled_from([None, half + 5]))
    own = replace(sizes, blocks=count, block_tokens=block_tokens)
    margin = draw(st.integers(0, 3))
    planes = layout.planes(
        own, address + margin, DRAM, first_head=first_head, value_offset_bytes=far
    )
    end = max(plane.span()[1] for plane in planes) - address
    blocks = BlockList(np.array(ids, dtype=np.int64), block_tokens, start)
    return Side(planes, blocks, end + margin)


@st.composite
def sizes(draw: st.DrawFn) -> CacheSizes:
    contents = draw(
        st.sampled_from(
            [(Content.KEY, Content.VALUE), (Content.KEY, Content.VALUE), (Content.LATENT,)]
        )
    )
    return CacheSizes(
        layers=draw(st.integers(1, 2)),
        blocks=1,
        heads=draw(st.integers(1, 3)),
        block_tokens=1,
        channels=draw(st.integers(1, 4)),
        item_bytes=draw(st.sampled_from([1, 2, 4])),
        contents=contents,
    )


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Side, Side, int, int]:
    first = draw(st.integers(0, 8))
    end = draw(st.integers(first, 20))
    alike = draw(sizes())
    return (
        draw(side(SOURCE, alike, first, end)),
        draw(side(TARGET, alike, first, end)),
        first,
        end,
    )


def expected_of(remote: Side, local: Side, tokens: range) -> tuple[bytes, bytearray]:
    """What the remote side holds, and what the local one does behind the slow copy."""
    source = noise(1, remote.total_bytes)
    target = bytearray(noise(2, local.total_bytes))
    slow_copy(
        source, SOURCE, target, TARGET, remote.planes, local.planes,
        remote.blocks, local.blocks, tokens,
    )  # fmt: skip
    return source, target


@given(transfers())
@settings(max_examples=300, deadline=None)
def test_any_two_geometries(drawn: Any) -> None:
    """Every item in its place, no byte twice, nothing else touched; and then the tail zeroed."""
    remote, local, first, end = drawn
    source, expected = expected_of(remote, local, range(first, end))
    found = bytearray(noise(2, local.total_bytes))
    segments = pair_blocks(remote.blocks, local.blocks, first, end)
    execute(plan_copy(segments, remote.planes, local.planes), source, SOURCE, found, TARGET)
    assert found == expected
    if first < end:  # the comparison can fail: a copy that is not done is noticed
        assert noise(2, local.total_bytes) != bytes(expected)
    slow_zero(expected, TARGET, local.planes, local.blocks, end)
    zero_tail(local, uncovered_tail(local.blocks, end), found)
    assert found == expected


def zero_tail(local: Side, tail: Segments, memory: bytearray) -> None:
    """Zeroes what a read leaves untouched, as engines do."""
    cache = Bytes(TARGET, torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)))
    for one in local.planes:
        zero_tokens(cache, one, tail)


@st.composite
def head_ranges(draw: st.DrawFn) -> tuple[list[Side], Side, int]:
    """Remote ranks with any heads each, copies too, that have all of the local rank's together."""
    end, whole = draw(st.integers(1, 8)), draw(sizes())
    heads = 1 if whole.contents == (Content.LATENT,) else draw(st.integers(1, 4))
    held = [
        range(first, draw(st.integers(first + 1, heads)))
        for first in draw(st.lists(st.integers(0, heads - 1), max_size=3))
    ]
    held += [range(head, head + 1) for head in set(range(heads)).difference(*held)]
    first = draw(st.integers(0, heads - 1))
    sides = [
        draw(side(address, replace(whole, heads=len(one)), 0, end, one.start))
        for address, one in [
            *((SOURCE, one) for one in held),
            (TARGET, range(first, draw(st.integers(first + 1, heads)))),
        ]
    ]
    return sides[:-1], sides[-1], end


def runs(plan: Plan) -> list[tuple[int, int, int]]:
    columns = (plan.remote_address - SOURCE, plan.local_address - TARGET, plan.length)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def alike(
    name: str, remote_ids: Sequence[int], local_ids: Sequence[int], tokens: int, **changes: Any
) -> Plan:
    # 5 blocks of 4 tokens, 3 heads of 8 channels of 2 bytes: 192 bytes of keys in a block.
    own = replace(CacheSizes(2, 5, 3, 4, 8, 2), **changes)
    layout = named_layout(name)
    segments = pair_blocks(
        BlockList(np.array(remote_ids), 4), BlockList(np.array(local_ids), 4), 0, tokens
    )
    return plan_copy(segments, layout.planes(own, SOURCE, DRAM), layout.planes(own, TARGET, DRAM))


def test_neighbours_on_both_sides_are_one_run() -> None:
    assert runs(alike("LBHNC", [0, 1, 2], [1, 2, 3], 12, layers=1)) == [(0, 384, 1152)]
    assert len(alike("LBHNC", [0, 1, 2], [1, 3, 4], 12, layers=1)) == 2


def test_keys_and_values_of_two_regions_are_never_one_run() -> None:
    assert runs(alike("NHD", [3, 4, 0], [3, 4, 0], 12, layers=1)) == [
        (576, 576, 384),
        (0, 0, 192),
        (1536, 1536, 384),
        (960, 960, 192),
    ]
    # Both regions whole, so that the last keys touch the first values.
    assert runs(alike("NHD", range(5), range(5), 20, layers=1)) == [(0, 0, 960), (960, 960, 960)]


def test_values_before_their_keys_are_never_one_run_with_them() -> None:
    keys = plane(counts=Counts(2, 2, 4, 8), address=SOURCE + 256)
    values = plane(counts=Counts(2, 2, 4, 8), content=Content.VALUE)
    last_first = BlockList(np.array([1, 0]), 4)
    plan = plan_copy(pair_blocks(last_first, last_first, 0, 8), [keys, values], [keys, values])
    assert (plan.remote_address - SOURCE).tolist() == [384, 256, 128, 0]
    assert plan.length.tolist() == [128] * 4


@pytest.mark.parametrize(
    ("key_strides", "key_channels", "value_strides", "value_channels", "apart"),
    [
        (Strides(256, 16, 64, 2), 8, Strides(256, 32, 64, 2), 8, 512),  # heads
        (Strides(256, 16, 64, 2), 8, Strides(256, 16, 32, 2), 8, 512),  # tokens
        (Strides(256, 16, 32, 2), 8, Strides(128, 16, 32, 2), 8, 512),  # blocks
        (Strides(256, 64, 16, 2), 4, Strides(256, 64, 16, 4), 4, 512),  # channels
        (Strides(256, 64, 16, 2), 8, Strides(256, 64, 16, 2), 6, 512),  # widths, in two regions
        (Strides(256, 128, 32, 4), 3, Strides(256, 128, 32, 4), 3, 6),  # interleaved channels
        (Strides(256, 128, 32, 2), 3, Strides(256, 128, 32, 2), 5, 6),  # packed: nothing unlike
    ],
)
def test_keys_and_values_that_differ_in_one_thing(
    key_strides, key_channels, value_strides, value_channels, apart
):
    counts = Counts(2, 2, 4, key_channels)
    keys = plane(strides_bytes=key_strides, counts=counts)
    values = plane(
        strides_bytes=value_strides,
        counts=counts._replace(channels=value_channels),
        content=Content.VALUE,
        address=SOURCE + apart,
    )
    source, expected, found = noise(1, 1024), bytearray(1024), bytearray(1024)
    planes = [keys, values]
    both = BlockList(np.array([1, 0]), 4)
    slow_copy(source, SOURCE, expected, SOURCE, planes, planes, both, both, range(7))
    plan = plan_copy(pair_blocks(both, both, 0, 7), planes, planes)
    execute(plan, source, SOURCE, found, SOURCE)
    assert found == expected


def plane(layer: str = "a", **changes: Any) -> Plane:
    counts, strides = Counts(2, 2, 4, 8), Strides(128, 16, 32, 2)
    own = Plane(layer, Content.KEY, SOURCE, strides, counts, 2, 0, DRAM)
    return replace(own, **changes)


ONE = BlockList(np.array([0]), 4)


@pytest.mark.parametrize("remote", [plane(item_bytes=1), plane(counts=Counts(2, 2, 4, 7))])
def test_planes_that_do_not_match_are_refused(remote: Plane) -> None:
    with pytest.raises(UnplannableCopy, match="one width and item size"):
        plan_copy(pair_blocks(ONE, ONE, 0, 4), [remote], [plane()])


@pytest.mark.parametrize(
    ("remote", "local", "found"),
    [
        (([2], 4), ([0], 4), "remote segments.*blocks up to 2"),
        (([0], 4), ([2], 4), "local segments.*blocks up to 2"),
        (([0], 5), ([0, 1], 4), "remote segments.*tokens up to 4"),
        (([0, 1], 4), ([0], 5), "local segments.*tokens up to 4"),
    ],
)
def test_segments_outside_a_plane_are_refused(remote, local, found):
    sides = [BlockList(np.array(ids), tokens) for ids, tokens in (remote, local)]
    segments = pair_blocks(*sides, 0, min(one.end_token for one in sides))
    with pytest.raises(UnplannableCopy, match=found):
        plan_copy(segments, [plane()], [plane()])


def test_a_value_plane_with_fewer_blocks_is_refused() -> None:
    """Keys and values that would be copied as one are still checked one by one."""
    values = plane(content=Content.VALUE, address=SOURCE + 512)
    short = replace(values, counts=values.counts._replace(blocks=1))
    segments = pair_blocks(BlockList(np.array([1]), 4), ONE, 0, 4)
    assert len(plan_copy(segments, [plane(), values], [plane(), values])) > 0
    with pytest.raises(UnplannableCopy, match="value plane"):
        plan_copy(segments, [plane(), short], [plane(), values])


@pytest.mark.parametrize("field", ["remote_block", "remote_offset", "local_block", "tokens"])
def test_negative_numbers_are_refused(field: str) -> None:
    segments = replace(pair_blocks(ONE, ONE, 0, 4), **{field: np.array([-1])})
    with pytest.raises(UnplannableCopy, match="-1"):
        plan_copy(segments, [plane()], [plane()])


def joined(plans: Sequence[Plan]) -> list[tuple[int, int, int]]:
    return [run for plan in plans for run in runs(plan)]


@given(transfers(), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_together_they_are_the_whole_plan(drawn: Any, most_runs: int, lots: int) -> None:
    remote, local, first, end = drawn
    segments = pair_blocks(remote.blocks, local.blocks, first, end)
    copies = copies_between(remote.planes, local.planes)
    parts = [(segments, copies[at::lots]) for at in range(lots)]
    whole = plan_runs(parts)

    found = list(plan_parts(parts, most_runs))

    assert sum(map(len, found)) == len(whole)
    if found:
        assert joined(found) == runs(whole)
        assert all(map(len, found))
    if len(found) > 1:  # as few as can be: two neighbours never fit into one
        pairs = zip(found, found[1:], strict=False)
        assert all(len(one) + len(other) > most_runs for one, other in pairs)
        assert joined(found[1:]) != runs(whole)  # the comparison can fail


def test_what_cannot_be_planned_is_refused_before_the_first_plan() -> None:
    planes = named_layout("LBNHC").planes(CacheSizes(2, 4, 2, 4, 8, 2), SOURCE, DRAM)
    copies = copies_between(planes, planes)
    right = pair_blocks(BlockList(np.array([0, 1]), 4), BlockList(np.array([1, 0]), 4), 0, 8)
    outside = replace(right, remote_block=right.remote_block + 3)
    assert len(next(plan_parts([(right, copies)], 1))) > 0
    with pytest.raises(UnplannableCopy):
        next(plan_parts([(right, copies), (outside, copies)], 1))


def test_nothing_is_no_plan() -> None:
    nothing = Segments(*(np.empty(0, dtype=np.int64) for _ in range(5)))
    assert list(plan_parts([])) == []
    assert list(plan_parts([(nothing, [])])) == []


def _plan(count: int, run_bytes: int) -> Plan:
    at = np.arange(count, dtype=np.int64) * run_bytes
    return Plan(at, at + (1 << 40), np.full(count, run_bytes, dtype=np.int64))


@pytest.mark.parametrize(
    ("run_bytes", "count", "taken"),
    [
        (1 << 20, 100, [32, 32, 32, 4]),  # too large to be spread
        (64 << 10, 3000, [1024, 1024, 512, 440]),
        (1 << 12, 20_000, [8192, 8192, 3616]),
        (16 << 10, 3000, [2048, 952]),
        (64 << 10, 600, [512, 88]),  # too few to be spread
        (1 << 30, 2, [1, 1]),
    ],
)
def test_a_post_takes_enough_runs_to_be_spread(run_bytes, count, taken):
    plan = _plan(count, run_bytes)
    found, left = [], plan
    while len(left):
        found.append(left.part(0, runs_of_a_post(left.length, is_spread=True)))
        left = left.part(len(found[-1]), len(left))
    assert [len(part) for part in found] == taken
    assert joined(found) == runs(plan)
    assert SPREAD_RUNS == 1024
