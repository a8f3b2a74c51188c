"""Pairing by token position: literal cases, properties, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.core.errors import UnpairableBlocks
from kvpatch.geometry.segments import (
    BlockList,
    Numbers,
    Segments,
    kernel_blocks,
    pair_blocks,
    uncovered_tail,
)

from .reference import token_place

pytestmark = pytest.mark.geometry


def blocks(ids: list[int], block_tokens: int, first_token: int = 0) -> BlockList:
    return BlockList(np.array(ids, dtype=np.int64), block_tokens, first_token)


CASES: dict[str, tuple[BlockList, BlockList, int, int, list[list[int]]]] = {
    "alike": (
        blocks([5, 6], 16), blocks([1, 9], 16), 0, 20,
        [[5, 0, 1, 0, 16], [6, 0, 9, 0, 4]],
    ),
    "large to small": (
        blocks([5], 64), blocks([1, 2, 3], 16), 0, 40,
        [[5, 0, 1, 0, 16], [5, 16, 2, 0, 16], [5, 32, 3, 0, 8]],
    ),
    "small to large": (
        blocks([7, 3, 4], 16), blocks([1], 64), 0, 40,
        [[7, 0, 1, 0, 16], [3, 0, 1, 16, 16], [4, 0, 1, 32, 8]],
    ),
    "no multiples": (
        blocks([5, 6], 48), blocks([1, 2, 3], 32), 0, 90,
        [[5, 0, 1, 0, 32], [5, 32, 2, 0, 16], [6, 0, 2, 16, 16], [6, 16, 3, 0, 26]],
    ),
    # 40 tokens, one decode block of 16 cached: where pairing from the end goes wrong.
    "prefix hit that does not line up": (
        blocks([10, 11, 12, 13, 14, 15, 16, 17, 18, 19], 4), blocks([1, 2], 16, 16), 16, 40,
        [
            [14, 0, 1, 0, 4], [15, 0, 1, 4, 4], [16, 0, 1, 8, 4], [17, 0, 1, 12, 4],
            [18, 0, 2, 0, 4], [19, 0, 2, 4, 4],
        ],
    ),
    "window that starts late on the remote side": (
        blocks([4, 5], 16, 32), blocks([0, 1, 2], 32), 40, 64,
        [[4, 8, 1, 8, 8], [5, 0, 1, 16, 16]],
    ),
    "one token": (blocks([3], 128), blocks([2], 16), 0, 1, [[3, 0, 2, 0, 1]]),
    "nothing": (blocks([], 128), blocks([], 16), 0, 0, []),
    "full prefix hit": (blocks([3], 16), blocks([], 16, 16), 16, 16, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_pairs(name: str) -> None:
    remote, local, first, end, expected = CASES[name]
    segments = pair_blocks(remote, local, first, end)
    assert segments.as_array().tolist() == expected
    assert len(segments) == len(expected)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[BlockList, BlockList, int, int]:
    first = draw(st.integers(0, 40))
    end = draw(st.integers(first, 120))
    lists = []
    for _ in range(2):
        block_tokens = draw(st.integers(1, 50))
        # Local lists start at any token up to the first one asked for, not only at a border.
        start = draw(st.integers(0, first))
        count = -(-(end - start) // block_tokens) + draw(st.integers(0, 2))
        ids = draw(st.permutations(range(count + 3)))[:count]
        lists.append(blocks(list(ids), block_tokens, start))
    return lists[0], lists[1], first, end


def each_token(segments: Segments) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [
        ((remote_block, remote_offset + step), (local_block, local_offset + step))
        for remote_block, remote_offset, local_block, local_offset, tokens in (
            segments.as_array().tolist()
        )
        for step in range(tokens)
    ]


@given(pairs())
def test_every_token_once_in_order_at_its_own_place(drawn: Any) -> None:
    remote, local, first, end = drawn
    segments = pair_blocks(remote, local, first, end)
    assert each_token(segments) == [
        (token_place(remote, token), token_place(local, token)) for token in range(first, end)
    ]
    array = segments.as_array()
    assert (array[:, 4] >= 1).all()
    assert (array[:, 1] + array[:, 4] <= remote.block_tokens).all()
    assert (array[:, 3] + array[:, 4] <= local.block_tokens).all()


@given(pairs(), st.data())
def test_a_split_request_is_the_whole_one(drawn: Any, data: st.DataObject) -> None:
    remote, local, first, end = drawn
    middle = data.draw(st.integers(first, end))
    whole = each_token(pair_blocks(remote, local, first, end))
    parts = each_token(pair_blocks(remote, local, first, middle))
    assert parts + each_token(pair_blocks(remote, local, middle, end)) == whole


@given(pairs())
def test_the_tail_is_what_the_transfer_does_not_cover(drawn: Any) -> None:
    _, local, _, end = drawn
    tail = uncovered_tail(local, end)
    assert [ours for _, ours in each_token(tail)] == [
        token_place(local, token) for token in range(end, local.end_token)
    ]
    assert np.array_equal(tail.remote_block, tail.local_block)
    assert np.array_equal(tail.remote_offset, tail.local_offset)


def test_kernel_blocks() -> None:
    assert kernel_blocks([3, 0], 4).tolist() == [12, 13, 14, 15, 0, 1, 2, 3]
    assert kernel_blocks([3, 0], 1).tolist() == [3, 0]
    assert kernel_blocks([], 4).tolist() == []
    with pytest.raises(UnpairableBlocks, match="found 0"):
        kernel_blocks([1], 0)


def test_kernel_blocks_pair_as_their_logical_blocks_do() -> None:
    logical = pair_blocks(blocks([5, 2], 64), blocks([1, 2, 3], 32), 0, 90)
    split = pair_blocks(
        BlockList(kernel_blocks([5, 2], 4), 16), BlockList(kernel_blocks([1, 2, 3], 2), 16), 0, 90
    )
    flat = [
        tuple(
            block * 4 + offset // 16 if side == 0 else block * 2 + offset // 16
            for side, (block, offset) in enumerate(token)
        )
        for token in each_token(logical)
    ]
    assert [(remote[0], local[0]) for remote, local in each_token(split)] == flat


@pytest.mark.parametrize(
    ("remote", "local", "first", "end", "found"),
    [
        (blocks([1], 16), blocks([1, 2], 16), 0, 17, "remote blocks for tokens 0 to 17"),
        (blocks([1, 2], 16), blocks([1], 16), 0, 17, "local blocks for tokens 0 to 17"),
        (blocks([1, 2], 16), blocks([1], 16, 16), 15, 32, "local blocks for tokens 15 to 32"),
        (blocks([1], 16, 16), blocks([1, 2], 16), 0, 32, "remote blocks for tokens 0 to 32"),
        (blocks([1], 16), blocks([1], 16), 9, 8, "found 9 to 8"),
        (blocks([1], 16), blocks([1], 16), -1, 8, "found -1 to 8"),
        (blocks([1, 2], 16), blocks([3, 3], 16), 0, 17, "1 of 2 repeated"),
    ],
)
def test_lists_that_lack_tokens_are_refused(
    remote: BlockList, local: BlockList, first: int, end: int, found: str
) -> None:
    with pytest.raises(UnpairableBlocks, match=found):
        pair_blocks(remote, local, first, end)


def test_a_remote_block_may_be_read_twice() -> None:
    assert len(pair_blocks(blocks([3, 3], 16), blocks([1, 2], 16), 0, 32)) == 2


def test_a_repeated_local_block_outside_the_range_is_not_written() -> None:
    assert len(pair_blocks(blocks([3, 4, 5], 16), blocks([0, 0, 2], 16), 32, 48)) == 1


@pytest.mark.parametrize(
    ("ids", "block_tokens", "first_token"),
    [([[1, 2]], 16, 0), ([1], 0, 0), ([1], 16, -1), ([-1], 16, 0)],
)
def test_bad_lists_are_refused(ids: Any, block_tokens: int, first_token: int) -> None:
    with pytest.raises(UnpairableBlocks, match="block list"):
        BlockList(ids, block_tokens, first_token)


def test_a_tail_outside_the_blocks_is_refused() -> None:
    for end in (15, 33):
        with pytest.raises(UnpairableBlocks, match=f"found {end}"):
            uncovered_tail(blocks([1], 16, 16), end)


@pytest.mark.parametrize(("remote", "local"), [(128, 32), (32, 128)])
def test_parts_of_one_block_are_one_kind(remote, local):
    segments = pair_blocks(
        BlockList(np.arange(512 // remote)[::-1], remote),
        BlockList(np.arange(512 // local), local),
        0,
        512,
    )
    (kind,) = segments.kinds
    assert (kind.parts, kind.tokens) == (4, 32)
    assert kind.steps == ((32, 0) if remote > local else (0, 32))
    assert kind.numbers[0].ids.shape == ((4,) if remote > local else (4, 4))
    assert kind.numbers[1].ids.shape == ((4, 4) if remote > local else (4,))


def test_a_part_that_is_not_read_leaves_the_others_together():
    segments = pair_blocks(
        BlockList(np.array([5, 2, 9]), 128), BlockList(np.arange(12), 32), 32, 384
    )
    found = {
        (kind.parts, *kind.numbers[0].ids.tolist()): kind.numbers[1].ids.tolist()
        for kind in segments.kinds
    }
    assert found == {
        (1, 2, 9): [4, 8],
        (3, 5, 2, 9): [[1, 2, 3], [5, 6, 7], [9, 10, 11]],
    }


def test_numbers_know_whether_they_are_evenly_apart():
    assert Numbers(np.array([3, 5, 7])).steps == (2,)
    assert Numbers(np.array([[0, 1], [4, 5], [8, 9]])).steps == (4, 1)
    assert Numbers(np.array([[0, 1], [4, 5], [8, 7]])).steps is None
    assert Numbers(np.array([5, 3, 1])).steps is None, "no view walks backwards"
    assert Numbers(np.array([5])).steps == (0,)
