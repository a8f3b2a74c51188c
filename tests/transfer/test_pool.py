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
    first, second = pool.take(reader, "p", 30), pool.take(reader, "p", 20)
    assert made == [100]
    pool.memory(first)[:] = 1
    assert pool.memory(second).sum() == 0
    assert pool.taken_bytes == 50


def test_reads_of_one_peer_get_space_in_the_order_of_asking(pool):
    first, second, third = Reader(), Reader(), Reader()
    held = pool.take(first, "p", 80)
    pool.leave(first)
    assert pool.take(second, "p", 50) is None
    assert pool.take(third, "p", 10) is None, "there is room, but the second asked first"
    pool.give(held)
    assert pool.take(third, "p", 10) is None
    assert pool.take(second, "p", 50) is not None
    pool.leave(second)
    assert pool.take(third, "p", 10) is None, "60 held, 40 left"


def test_a_peer_that_hangs_leaves_room_for_the_others(pool):
    hung = [Reader() for _ in range(3)]
    assert pool.take(hung[0], "hung", 30)
    pool.leave(hung[0])
    assert pool.take(hung[1], "hung", 30) is None, "it would hold more than it leaves"
    other = Reader()
    for _ in range(5):
        space = pool.take(other, "other", 30)
        assert space is not None, "though two of the hung peer's asked before"
        pool.leave(other)
        pool.give(space)


def test_nobody_overtakes_a_peer_that_holds_nothing(pool):
    busy, first, second = Reader(), Reader(), Reader()
    held = pool.take(busy, "busy", 80)
    pool.leave(busy)
    assert pool.take(first, "a", 50) is None
    assert pool.take(second, "b", 10) is None
    pool.give(held)
    assert pool.take(second, "b", 10) is None
    assert pool.take(first, "a", 50) is not None
    pool.leave(first)
    assert pool.take(second, "b", 10) is not None


def test_a_round_as_large_as_the_pool_is_served(pool):
    assert pool.take(Reader(), "p", 100) is not None


def test_a_reader_that_was_dropped_blocks_nobody(pool):
    first, second = Reader(), Reader()
    held = pool.take(first, "p", 80)
    pool.leave(first)
    assert pool.take(second, "p", 50) is None
    del second
    gc.collect()
    pool.give(held)
    assert pool.take(Reader(), "p", 50) is not None


def test_lost_space_comes_back_when_its_transfer_is_over(pool):
    over = []
    reader = Reader()
    pool.lose(pool.take(reader, "gone", 60), lambda: bool(over))
    pool.leave(reader)
    with pytest.raises(PoolExhausted, match="KVPATCH_STAGING_BYTES"):
        pool.take(reader, "p", 50)
    assert pool.taken_bytes == 60
    over.append(True)
    assert pool.take(reader, "p", 50) is not None
    assert pool.taken_bytes == 50


def test_a_reader_waits_where_others_will_give_back(pool):
    first, second, third = Reader(), Reader(), Reader()
    pool.lose(pool.take(first, "gone", 40), lambda: False)
    pool.leave(first)
    held = pool.take(second, "p", 40)
    pool.leave(second)
    assert pool.take(third, "q", 50) is None, "40 bytes are in use: waiting can help"
    pool.give(held)
    assert pool.take(third, "q", 50) is not None


@given(st.data())
def test_whatever_the_order_everybody_is_served(data):
    """Any rounds of any peers that end in any order: none waits for ever."""
    pool = StagingPool(100, lambda size: torch.zeros(size, dtype=torch.uint8))
    rounds = st.lists(st.integers(1, 50), min_size=1, max_size=4)
    left = {
        Reader(): (f"p{peer}", sizes)
        for peer in range(3)
        for sizes in data.draw(st.lists(rounds, max_size=3))
    }
    flights = []
    for _ in range(1000):
        for reader, (peer, sizes) in left.items():
            while sizes:
                space = pool.take(reader, peer, sizes[0])
                if space is None:
                    break
                sizes.pop(0)
                flights.append(space)
            if not sizes:
                pool.leave(reader)
        if not flights:
            break
        pool.give(flights.pop(data.draw(st.integers(0, len(flights) - 1))))
    assert not any(sizes for _, sizes in left.values())
    assert pool.taken_bytes == 0


def test_rounds_are_small_beside_the_pool():
    assert StagingPool(1 << 30, torch.zeros).round_bytes == 16 << 20
    assert StagingPool(1 << 30, torch.zeros, on_device=True).round_bytes == 16 << 20
    assert StagingPool(4096, torch.zeros).round_bytes == 1024


def test_rounds_shrink_for_a_reader_that_is_hardly_away_and_grow_for_one_that_is():
    pool = StagingPool(1 << 28, torch.zeros)
    for _ in range(8):
        pool.pace.looked(away_seconds=1e-6, working_seconds=1e-3)
    assert pool.round_bytes == 8 << 20
    pool.pace.looked(away_seconds=0.9e-3, working_seconds=1e-3)
    assert pool.round_bytes == 8 << 20, "it works about as long as it is away"
    for _ in range(8):
        pool.pace.looked(away_seconds=1e-2, working_seconds=1e-3)
    assert pool.round_bytes == 64 << 20, "a quarter of the pool"


def test_rounds_of_a_device_keep_their_size():
    pool = StagingPool(1 << 28, torch.zeros, on_device=True)
    for away in (1.0, 0.0):
        for _ in range(4):
            pool.pace.looked(away, working_seconds=1e-3)
        assert pool.round_bytes == 16 << 20
