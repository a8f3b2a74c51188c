"""Blocks that are no rows of tokens: never cut, and byte for byte alike on both sides.

And rows of layers of several attention groups: which layers have one place, which rows pair.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvpatch.core.errors import UnpairableBlocks, UnplannableCopy
from kvpatch.geometry.cross_layer_blocks import pair_whole_blocks, places_of
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides
from kvpatch.geometry.plane_copies import check_whole
from kvpatch.geometry.segments import BlockList, pair_blocks

from .planned import plan_copy

pytestmark = pytest.mark.geometry

TOKENS, WIDTH = 16, 132
BLOCK = TOKENS * WIDTH


def plane(address: int, **changes: object) -> Plane:
    whole = Plane(
        layer="a",
        content=Content.LATENT,
        address=address,
        strides_bytes=Strides(BLOCK, BLOCK, WIDTH, 1),
        counts=Counts(8, 1, TOKENS, WIDTH),
        item_bytes=1,
        first_head=0,
        memory=Memory("DRAM"),
        is_whole=True,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def blocks(ids: list[int], first_token: int = 0) -> BlockList:
    return BlockList(np.array(ids, dtype=np.int64), TOKENS, first_token)


def test_the_last_block_moves_whole_too() -> None:
    segments = pair_blocks(blocks([5, 3]), blocks([1, 2]), 0, TOKENS + 4)
    plan = plan_copy(segments.in_whole_blocks(TOKENS), [plane(0)], [plane(1 << 20)])

    assert plan.remote_address.tolist() == [5 * BLOCK, 3 * BLOCK]
    assert plan.local_address.tolist() == [(1 << 20) + BLOCK, (1 << 20) + 2 * BLOCK]
    assert plan.length.tolist() == [BLOCK, BLOCK]


def test_a_part_of_a_block_is_never_planned() -> None:
    segments = pair_blocks(blocks([5]), blocks([1]), 0, 4)

    with pytest.raises(UnplannableCopy, match="whole blocks"):
        plan_copy(segments, [plane(0)], [plane(1 << 20)])


def test_blocks_that_do_not_hold_the_same_tokens_are_not_paired() -> None:
    segments = pair_blocks(blocks([5, 6]), blocks([1], 8), 8, 20)

    with pytest.raises(UnpairableBlocks, match="same tokens"):
        segments.in_whole_blocks(TOKENS)


_UNLIKE = {
    "other tokens": {"counts": Counts(8, 1, TOKENS // 2, WIDTH)},
    "other heads": {
        "counts": Counts(8, 2, TOKENS, WIDTH),
        "strides_bytes": Strides(2 * BLOCK, BLOCK, WIDTH, 1),
    },
    "the heads of another rank": {"first_head": 1},
    "rows": {"is_whole": False},
    "another order": {"strides_bytes": Strides(BLOCK, BLOCK, 1, TOKENS)},
}


@pytest.mark.parametrize("name", _UNLIKE)
def test_blocks_that_are_not_alike_are_refused(name: str) -> None:
    with pytest.raises(UnplannableCopy, match="alike on both sides"):
        check_whole(plane(0, **_UNLIKE[name]), plane(1 << 20))


def test_slots_may_lie_apart_and_tokens_may_not() -> None:
    counts = Counts(8, 2, TOKENS, WIDTH)
    beside = plane(0, counts=counts, strides_bytes=Strides(2 * BLOCK, BLOCK, WIDTH, 1))
    apart = plane(0, counts=counts, strides_bytes=Strides(BLOCK, 8 * BLOCK, WIDTH, 1))
    inside = plane(0, counts=counts, strides_bytes=Strides(2 * BLOCK, WIDTH, 2 * WIDTH, 1))

    check_whole(apart, beside)
    with pytest.raises(UnplannableCopy):
        check_whole(inside, beside)


# --- rows of layers of several attention groups ---------------------------------------


def _names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"layers.{number}.attn" for number in numbers)


@pytest.mark.parametrize(
    ("groups", "places"),
    [
        ([{0, 1, 2}], [(0,), (1,), (2,)]),
        ([{0, 2, 10}, {1, 3, 11}], [(0, 1), (2, 3), (10, 11)]),
        # The longest group has a layer everywhere, and comes first.
        ([{5}, {0, 1, 2}, {3, 4}], [(0, 3, 5), (1, 4), (2,)]),
        ([], []),
    ],
)
def test_the_nth_layers_of_all_groups_have_one_place(groups, places):
    found = places_of([_names(*group) for group in groups])

    assert found == tuple(_names(*place) for place in places)


@pytest.mark.parametrize(
    ("first_token", "remote_first", "local_first", "count"),
    [
        (0, 0, 0, 7),
        (70, 64, 64, 3),  # a window that begins inside a block takes the whole of it
        (70, 64, 56, None),  # blocks of other tokens
    ],
)
def test_blocks_of_the_same_tokens_pair_whole(first_token, remote_first, local_first, count):
    remote = BlockList(np.arange(10, 20), 16, remote_first)
    local = BlockList(np.arange(50, 60), 16, local_first)

    found = pair_whole_blocks(pair_blocks(remote, local, first_token, 100))

    if count is None:
        assert found is None
    else:
        pairs = list(zip(*(column.tolist() for column in found), strict=True))
        assert pairs == [(10 + n, 50 + n) for n in range(count)]
