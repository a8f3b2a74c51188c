"""Plans, done on byte arrays, against the slow copy of one item at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.direct_plan import Plan
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides, names_of_heads
from kvpatch.geometry.segments import BlockList, pair_blocks, uncovered_tail

from .planned import plan_copy
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
    """Every item in its place, the tail zeroed, nothing else touched, no byte twice."""
    remote, local, first, end = drawn
    source, expected = expected_of(remote, local, range(first, end))
    slow_zero(expected, TARGET, local.planes, local.blocks, end)
    plan = plan_copy(
        pair_blocks(remote.blocks, local.blocks, first, end),
        remote.planes,
        local.planes,
        uncovered_tail(local.blocks, end),
    )
    found = bytearray(noise(2, local.total_bytes))
    execute(plan, source, SOURCE, found, TARGET)
    assert found == expected
    if first < end:  # the comparison can fail: a copy that is not done is noticed
        assert noise(2, local.total_bytes) != bytes(expected)


@st.composite
def head_ranges(draw: st.DrawFn) -> tuple[list[Side], list[Side], int]:
    """Ranks of both sides: KV heads split between them, or copies where ranks exceed heads."""
    heads = draw(st.sampled_from([1, 2, 4]))
    end = draw(st.integers(1, 8))
    whole = draw(sizes())
    if whole.contents == (Content.LATENT,):
        heads = 1
    ranks = []
    for address in (SOURCE, TARGET):
        count = draw(st.sampled_from([1, 2, 4]))
        ranks.append(
            [
                draw(
                    side(address, replace(whole, heads=max(1, heads // count)), 0, end,
                         rank * heads // count)
                )
                for rank in range(count)
            ]
        )  # fmt: skip
    return ranks[0], ranks[1], end


@given(head_ranges())
@settings(max_examples=150, deadline=None)
def test_unlike_tensor_parallel_ranks(drawn: Any) -> None:
    """Each local rank reads what it needs from as many remote ranks as hold it."""
    remotes, locals_, end = drawn
    for local in locals_:
        expected, found = (bytearray(noise(2, local.total_bytes)) for _ in range(2))
        left = names_of_heads(local.planes)
        for number, remote in enumerate(remotes):
            now = names_of_heads(local.planes) - names_of_heads(remote.planes)
            if not left - now:
                continue  # another copy of heads that have been read
            left &= now
            source = noise(10, remote.total_bytes + number)[number:]
            slow_copy(
                source, SOURCE, expected, TARGET, remote.planes, local.planes,
                remote.blocks, local.blocks, range(end),
            )  # fmt: skip
            segments = pair_blocks(remote.blocks, local.blocks, 0, end)
            plan = plan_copy(segments, remote.planes, local.planes, partial_heads=True)
            execute(plan, source, SOURCE, found, TARGET)
        assert not left
        assert found == expected


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


@pytest.mark.parametrize("key_layout", LAYOUTS)
@pytest.mark.parametrize("value_layout", LAYOUTS)
def test_keys_and_values_that_lie_unlike(key_layout: str, value_layout: str) -> None:
    """Like on both sides, so that only keys against values can go wrong."""
    own = CacheSizes(2, 3, 2, 3, 2, 1)
    room = own.total_bytes()

    def mixed(address: int) -> list[Plane]:
        keys = named_layout(key_layout).planes(own, address, DRAM)
        values = named_layout(value_layout).planes(own, address + room, DRAM)
        return [one for pair in zip(keys[::2], values[1::2], strict=True) for one in pair]

    remote, local = BlockList(np.array([2, 0]), 3), BlockList(np.array([0, 1]), 3)
    source, expected, found = noise(1, 2 * room), *(bytearray(noise(2, 2 * room)) for _ in "ab")
    ours, theirs = mixed(TARGET), mixed(SOURCE)
    slow_copy(source, SOURCE, expected, TARGET, theirs, ours, remote, local, range(5))
    plan = plan_copy(pair_blocks(remote, local, 0, 5), theirs, ours)
    execute(plan, source, SOURCE, found, TARGET)
    assert found == expected


@pytest.mark.parametrize(
    ("key_strides", "key_channels", "value_strides", "value_channels", "apart"),
    [
        (Strides(256, 16, 64, 2), 8, Strides(256, 32, 64, 2), 8, 512),  # heads
        (Strides(256, 64, 16, 2), 4, Strides(256, 64, 16, 4), 4, 512),  # channels
        (Strides(256, 64, 16, 2), 8, Strides(256, 64, 16, 2), 6, 512),  # widths, in two regions
        (Strides(256, 128, 32, 4), 3, Strides(256, 128, 32, 4), 3, 6),  # interleaved channels
        (Strides(256, 128, 32, 2), 3, Strides(256, 128, 32, 2), 5, 6),  # packed: nothing unlike
    ],
)
def test_keys_and_values_that_differ_in_one_thing(
    key_strides: Strides, key_channels: int, value_strides: Strides, value_channels: int, apart: int
) -> None:
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
    slow_copy(source, SOURCE, expected, SOURCE, planes, planes, ONE, ONE, range(4))
    plan = plan_copy(pair_blocks(ONE, ONE, 0, 4), planes, planes)
    execute(plan, source, SOURCE, found, SOURCE)
    assert found == expected


def plane(layer: str = "a", **changes: Any) -> Plane:
    counts, strides = Counts(2, 2, 4, 8), Strides(128, 16, 32, 2)
    own = Plane(layer, Content.KEY, SOURCE, strides, counts, 2, 0, DRAM)
    return replace(own, **changes)


ONE = BlockList(np.array([0]), 4)


@pytest.mark.parametrize(
    ("remote", "local", "found"),
    [
        ([plane("b")], [plane()], "layer 'a' with head 0, found none, nor 1 more"),
        ([], [plane()], "layer 'a' with head 0"),
        ([plane(first_head=1)], [plane()], "layer 'a' with head 0, found none, nor 0 more"),
        ([plane(content=Content.VALUE)], [plane()], "key plane of layer 'a'"),
        ([plane(item_bytes=1)], [plane()], "one width and item size"),
        ([plane(counts=Counts(2, 2, 4, 7))], [plane()], "one width and item size"),
    ],
)
def test_planes_that_do_not_match_are_refused(
    remote: list[Plane], local: list[Plane], found: str
) -> None:
    with pytest.raises(UnplannableCopy, match=found):
        plan_copy(pair_blocks(ONE, ONE, 0, 4), remote, local)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("remote_ids", "remote_tokens", "local_ids", "local_tokens", "found"),
    [
        ([2], 4, [0], 4, "remote segments.*blocks up to 2"),
        ([0], 4, [2], 4, "local segments.*blocks up to 2"),
        ([0], 5, [0, 1], 4, "remote segments.*tokens up to 4"),
        ([0, 1], 4, [0], 5, "local segments.*tokens up to 4"),
    ],
)
def test_segments_outside_a_plane_are_refused(
    name: str,
    remote_ids: list[int],
    remote_tokens: int,
    local_ids: list[int],
    local_tokens: int,
    found: str,
) -> None:
    planes = named_layout(name).planes(CacheSizes(1, 2, 2, 4, 8, 2), SOURCE, DRAM)
    remote = BlockList(np.array(remote_ids), remote_tokens)
    local = BlockList(np.array(local_ids), local_tokens)
    end = min(remote.end_token, local.end_token)
    with pytest.raises(UnplannableCopy, match=found):
        plan_copy(pair_blocks(remote, local, 0, end), planes, planes)


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
