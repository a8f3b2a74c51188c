"""Pairing by token position: properties, refusals."""

from __future__ import annotations

from dataclasses import fields
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


def as_array(segments: Segments) -> Any:
    return np.stack([getattr(segments, field.name) for field in fields(segments)], axis=1)


def each_token(segments: Segments) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [
        ((remote_block, remote_offset + step), (local_block, local_offset + step))
        for remote_block, remote_offset, local_block, local_offset, tokens in (
            as_array(segments).tolist()
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
    borders = remote.block_ids.size + local.block_ids.size
    assert len(segments) <= borders, "a segment ends where a block does"
    array = as_array(segments)
    assert (array[:, 4] >= 1).all()
    assert (array[:, 1] + array[:, 4] <= remote.block_tokens).all()
    assert (array[:, 3] + array[:, 4] <= local.block_tokens).all()
    tail = uncovered_tail(local, end)  # what the transfer does not cover
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
def test_lists_that_lack_tokens_are_refused(remote, local, first, end, found):
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
    assert found == {(1, 2, 9): [4, 8], (3, 5, 2, 9): [[1, 2, 3], [5, 6, 7], [9, 10, 11]]}


def test_numbers_know_whether_they_are_evenly_apart():
    assert Numbers(np.array([3, 5, 7])).steps == (2,)
    assert Numbers(np.array([[0, 1], [4, 5], [8, 9]])).steps == (4, 1)
    assert Numbers(np.array([[0, 1], [4, 5], [8, 7]])).steps is None
    assert Numbers(np.array([5, 3, 1])).steps is None, "no view walks backwards"
    assert Numbers(np.array([5])).steps == (0,)
