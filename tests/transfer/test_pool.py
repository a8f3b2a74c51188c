"""The staging pool and its arithmetic; transfers are a stand-in here, in the lab they are real."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.transfer.pool import PoolExhausted, StagingPool
from kvpatch.transfer.room import Room

pytestmark = pytest.mark.patching


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40))), st.integers(1, 100))
def test_spaces_never_overlap_and_all_comes_back(steps, size):
    room, held = Room(size), []
    for takes, number in steps:
        if takes:
            space = room.take(number)
            if space is None:
                continue
            assert space.end - space.start == number
            assert space.start >= 0 and space.end <= size
            assert all(space.end <= o.start or o.end <= space.start for o in held)
            held.append(space)
        elif held:
            room.give(held.pop(number % len(held)))
        assert room.taken_bytes == sum(s.end - s.start for s in held)
    for space in held:
        room.give(space)
    assert room.taken_bytes == 0
    assert room.take(size) is not None, "free spaces that touch are one"


def test_a_space_given_twice_is_an_error():
    room = Room(10)
    space = room.take(4)
    room.give(space)
    with pytest.raises(ValueError, match="free already"):
        room.give(space)


class Reader:
    """Whoever asks for space; the pool only knows it by identity."""


@pytest.fixture
def made():
    return []


@pytest.fixture
def pool(made):
    def make(size):
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    return StagingPool(100, make)


def test_memory_is_made_once_and_only_when_asked_for(pool, made):
    assert made == []
    reader = Reader()
    first, second = pool.take(reader, 30), pool.take(reader, 30)
    assert made == [100]
    pool.memory(first)[:] = 1
    assert pool.memory(second).sum() == 0
    assert pool.taken_bytes == 60


def test_nobody_overtakes_a_reader_that_waits(pool):
    first, second, third = Reader(), Reader(), Reader()
    held = pool.take(first, 80)
    pool.leave(first)
    assert pool.take(second, 50) is None
    assert pool.take(third, 10) is None, "there is room, but the second asked first"
    pool.give(held)
    assert pool.take(third, 10) is None
    assert pool.take(second, 50) is not None
    pool.leave(second)
    assert pool.take(third, 10) is not None


def test_a_reader_that_was_dropped_blocks_nobody(pool):
    first, second = Reader(), Reader()
    held = pool.take(first, 80)
    pool.leave(first)
    assert pool.take(second, 50) is None
    del second
    gc.collect()
    pool.give(held)
    assert pool.take(Reader(), 50) is not None


def test_lost_space_comes_back_when_its_transfer_is_over(pool):
    over = []
    reader = Reader()
    pool.lose(pool.take(reader, 60), lambda: bool(over))
    with pytest.raises(PoolExhausted, match="KVPATCH_STAGING_BYTES"):
        pool.take(reader, 50)
    assert pool.taken_bytes == 60
    over.append(True)
    assert pool.take(reader, 50) is not None
    assert pool.taken_bytes == 50


def test_a_reader_waits_where_others_will_give_back(pool):
    first, second = Reader(), Reader()
    pool.lose(pool.take(first, 40), lambda: False)
    held = pool.take(first, 40)
    pool.leave(first)
    assert pool.take(second, 50) is None, "40 bytes are in use: waiting can help"
    pool.give(held)
    assert pool.take(second, 50) is not None


def test_rounds_are_small_beside_the_pool():
    assert StagingPool(1 << 30, torch.zeros).round_bytes == 16 << 20
    assert StagingPool(4096, torch.zeros).round_bytes == 1024
