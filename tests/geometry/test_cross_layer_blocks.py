"""Rows of layers of several attention groups: which layers have one place, which rows pair."""

from __future__ import annotations

import numpy as np
import pytest

from kvpatch.geometry.cross_layer_blocks import pair_whole_blocks, places_of
from kvpatch.geometry.segments import BlockList, pair_blocks

pytestmark = pytest.mark.geometry


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
def test_the_nth_layers_of_all_groups_have_one_place(
    groups: list[set[int]], places: list[tuple[int, ...]]
) -> None:
    found = places_of([_names(*group) for group in groups])

    assert found == tuple(_names(*place) for place in places)


def _pairs(first_token: int, remote_first: int, local_first: int) -> list[tuple[int, int]] | None:
    remote = BlockList(np.arange(10, 20), 16, remote_first)
    local = BlockList(np.arange(50, 60), 16, local_first)
    found = pair_whole_blocks(pair_blocks(remote, local, first_token, 100))
    return None if found is None else list(zip(*(c.tolist() for c in found), strict=True))


def test_blocks_of_the_same_tokens_pair_whole() -> None:
    assert _pairs(0, 0, 0) == [(10 + n, 50 + n) for n in range(7)]


def test_a_window_that_begins_inside_a_block_takes_the_whole_of_it() -> None:
    assert _pairs(70, 64, 64) == [(10, 50), (11, 51), (12, 52)]


def test_blocks_of_other_tokens_do_not() -> None:
    assert _pairs(70, 64, 56) is None
