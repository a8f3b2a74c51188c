"""The prefix hits of several cache groups, while the groups get blocks for loaded tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.patches.same_prompt import _hold_all_hits

_BLOCK_TOKENS = 16


class _Pool:
    """Stand-in: the block pool of 0.14 to 0.23, without hashes."""

    def __init__(self, blocks: int) -> None:
        self.null = SimpleNamespace(number=0, ref_cnt=1, is_null=True)
        numbers = range(1, 1 + blocks)
        self.blocks = [SimpleNamespace(number=n, ref_cnt=0, is_null=False) for n in numbers]
        self.free = list(self.blocks)

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            if not block.ref_cnt and not block.is_null:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
        self.free += (block for block in blocks if not block.ref_cnt and not block.is_null)

    def get_new_blocks(self, count: int) -> list[Any]:
        if count > len(self.free):
            raise ValueError("no free blocks")
        found = [self.free.pop(0) for _ in range(count)]
        for block in found:
            block.ref_cnt += 1
        return found

    @property
    def state(self) -> tuple[list[int], list[int]]:
        counts = [block.ref_cnt for block in (self.null, *self.blocks)]
        return counts, [block.number for block in self.free]


class _Group:
    """Stand-in: the manager of a cache group's blocks, which holds its own hit alone."""

    block_size = _BLOCK_TOKENS

    def __init__(self, pool: _Pool, window: int) -> None:
        self.pool, self.window, self.blocks = pool, window, list[Any]()

    def get_num_skipped_tokens(self, tokens: int) -> int:
        return max(0, tokens - self.window + 1) if self.window else 0

    def take(self, hit: list[Any], tokens: int) -> None:
        skipped = self.get_num_skipped_tokens(tokens) // _BLOCK_TOKENS
        self.pool.touch(hit[skipped:])
        self.blocks = [self.pool.null] * skipped + hit[skipped:]
        self.blocks += self.pool.get_new_blocks(-(-tokens // _BLOCK_TOKENS) - len(self.blocks))


def _allocated(
    pool: _Pool, hits: tuple[list[Any], ...], loaded: int, *, window: int = 0, is_held: bool
) -> list[list[int]]:
    """The blocks of each group, the last of which has a window; with the wrapper or without."""
    windows = (*(0 for _ in hits[1:]), window)
    groups = [_Group(pool, found) for found in windows]

    def wrapped(_: str, found: tuple[list[Any], ...], local: int, external: int) -> None:
        for group, hit in zip(groups, found, strict=True):
            group.take(hit, local + external)

    counts = (_BLOCK_TOKENS * len(hits[0]), loaded)
    if is_held:
        coordinator = SimpleNamespace(single_type_managers=groups, block_pool=pool)
        _hold_all_hits(wrapped, coordinator, "request", hits, *counts)
    else:
        wrapped("request", hits, *counts)
    return [[block.number for block in group.blocks] for group in groups]


def test_no_group_gets_blocks_of_a_later_groups_hit() -> None:
    pools = _Pool(8), _Pool(8)
    # Blocks 1 and 2 are the next to be evicted, and the second group's hit.
    stock, held = (
        _allocated(pool, (pool.blocks[4:6], pool.blocks[0:2]), 32, is_held=is_held)
        for pool, is_held in zip(pools, (False, True), strict=True)
    )
    assert stock == [[5, 6, 1, 2], [1, 2, 3, 4]], "the negative control"
    assert held == [[5, 6, 3, 4], [1, 2, 7, 8]]
    assert pools[1].state == ([1] + [1] * 8, []), "all that the release counts, and no more"


@pytest.mark.parametrize("window", [0, 24, 40, 200])
@pytest.mark.parametrize("loaded", [0, 1, 16, 40])
def test_where_no_hit_is_in_the_way_all_is_as_without_the_wrapper(window: int, loaded: int) -> None:
    found = []
    for is_held in (False, True):
        pool = _Pool(30)
        pool.touch(pool.blocks[21:22])  # another request's
        hits = pool.blocks[20:23], [pool.null, *pool.blocks[24:26]]
        found.append((_allocated(pool, hits, loaded, window=window, is_held=is_held), pool.state))
    assert found[0] == found[1]


def test_a_block_in_front_of_the_window_stays_free() -> None:
    pool = _Pool(9)
    hits = pool.blocks[0:2], pool.blocks[2:4]
    assert _allocated(pool, hits, 32, window=17, is_held=True) == [[1, 2, 3, 4], [0, 0, 0, 5]]
    assert pool.state[1] == [6, 7, 8, 9]


def test_a_block_that_a_hit_names_twice_is_held_as_often_as_stock_holds_it() -> None:
    pool = _Pool(9)
    block = pool.blocks[8]
    _allocated(pool, ([block, block], [block, block]), 16, is_held=True)
    assert block.ref_cnt == 4


def test_what_raises_leaves_free_what_no_group_holds() -> None:
    pool = _Pool(5)
    with pytest.raises(ValueError, match="no free blocks"):
        _allocated(pool, (pool.blocks[0:1], pool.blocks[1:2]), 80, is_held=True)
    assert pool.state == ([1, 1, 0, 0, 0, 0], [3, 4, 5, 2])
