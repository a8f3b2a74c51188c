"""The staging pool and its arithmetic; transfers are a stand-in here, in the lab they are real."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.core.errors import PoolExhausted
from kvpatch.transfer.staging_pool import Room, Space, StagingPool, Turn

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
    """A reader that lines up when it asks for space for the first time."""

    turn: Turn | None = None


def take(pool: StagingPool, reader: Reader, peer: str, size_bytes: int) -> Space | None:
    if reader.turn is None:
        reader.turn = pool.line_up(id(reader), peer)
    return pool.take(reader.turn, size_bytes)


def leave(pool: StagingPool, reader: Reader) -> None:
    if reader.turn is not None:
        pool.leave(reader.turn)
    reader.turn = None


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
    first, second = take(pool, reader, "p", 30), take(pool, reader, "p", 20)
    assert made == [100]
    pool.memory(first)[:] = 1
    assert pool.memory(second).sum() == 0
    assert pool.taken_bytes == 50


def test_memory_is_let_go_of_and_made_anew_unless_something_may_write_to_it(pool, made):
    assert pool.let_go() is None
    reader, is_over = Reader(), []
    first = take(pool, reader, "p", 30)
    assert pool.let_go() is None
    pool.lose(first, lambda: bool(is_over))
    leave(pool, reader)
    assert pool.let_go() is None
    is_over.append(True)

    assert pool.let_go().numel() == 100
    assert not pool.is_made
    assert pool.let_go() is None
    second = take(pool, Reader(), "q", 20)
    assert pool.memory(second).numel() == 20
    assert made == [100, 100]


def test_reads_that_wait_for_others_are_counted_once(pool):
    first, second, third = Reader(), Reader(), Reader()
    held = take(pool, first, "p", 60)
    assert take(pool, first, "p", 60) is None, "for its own chunk, which is no wait for others"
    assert (pool.waiting, pool.waits) == (0, 0)
    for reader in (second, third, second):
        assert take(pool, reader, "p", 60) is None
    assert (pool.waiting, pool.waits) == (2, 2)
    leave(pool, first)
    pool.give(held)
    held = take(pool, second, "p", 60)
    assert (pool.waiting, pool.waits) == (1, 2)
    assert take(pool, second, "p", 60) is None
    assert (pool.waiting, pool.waits) == (1, 2)
    leave(pool, third)
    assert (pool.waiting, pool.waits) == (0, 2), "given up"


def test_a_peer_that_hangs_leaves_room_for_the_others(pool):
    hung = [Reader() for _ in range(3)]
    assert take(pool, hung[0], "hung", 30)
    leave(pool, hung[0])
    assert take(pool, hung[1], "hung", 30) is None, "it would hold more than it leaves"
    other = Reader()
    for _ in range(5):
        space = take(pool, other, "other", 30)
        assert space is not None, "though two of the hung peer's asked before"
        leave(pool, other)
        pool.give(space)


def test_a_reader_that_was_dropped_blocks_nobody(pool):
    first, second = Reader(), Reader()
    held = take(pool, first, "p", 80)
    leave(pool, first)
    assert take(pool, second, "p", 50) is None
    leave(pool, second)
    pool.give(held)
    assert pool.waiting == 0
    assert take(pool, Reader(), "p", 50) is not None


def test_lost_space_comes_back_when_its_transfer_is_over(pool):
    over = []
    reader = Reader()
    pool.lose(take(pool, reader, "gone", 60), lambda: bool(over))
    leave(pool, reader)
    with pytest.raises(PoolExhausted, match="KVPATCH_STAGING_BYTES"):
        take(pool, reader, "p", 50)
    assert pool.taken_bytes == 60
    over.append(True)
    assert take(pool, reader, "p", 50) is not None
    assert pool.taken_bytes == 50


def test_a_peer_whose_transfers_fail_leaves_half_to_others(pool):
    """Its ranks fail one after the other, and each of their reads posts once more."""
    over, taken, other = [], 0, Reader()
    pool.give(take(pool, other, "alive", 10))
    leave(pool, other)
    with pytest.raises(PoolExhausted, match="two minutes"):
        for _ in range(10):
            reader = Reader()
            space = take(pool, reader, "dead", 20)
            pool.lose(space, lambda: bool(over), has_failed=True)
            leave(pool, reader)
            taken += 20
    leave(pool, reader)
    assert taken == 40, "one more would be over half"
    assert take(pool, Reader(), "alive", 50) is not None

    over.append(True)
    assert take(pool, Reader(), "dead", 20) is not None


def test_the_only_peer_has_all_that_its_failed_transfers_leave(pool):
    reader = Reader()
    for _ in range(4):
        pool.lose(take(pool, reader, "p", 20), lambda: False, has_failed=True)
    assert take(pool, reader, "p", 20) is not None


def test_who_waits_for_its_own_failed_transfers_keeps_nobody_waiting(pool):
    for peer in ("a", "b"):
        reader = Reader()
        pool.lose(take(pool, reader, peer, 25), lambda: False, has_failed=True)
        leave(pool, reader)
    assert take(pool, Reader(), "a", 25) is None
    assert take(pool, Reader(), "c", 20) is not None


def test_a_reader_waits_where_others_will_give_back(pool):
    first, second, third = Reader(), Reader(), Reader()
    pool.lose(take(pool, first, "gone", 40), lambda: False)
    leave(pool, first)
    held = take(pool, second, "p", 40)
    leave(pool, second)
    assert take(pool, third, "q", 50) is None, "40 bytes are in use: waiting can help"
    pool.give(held)
    assert take(pool, third, "q", 50) is not None


@given(st.data())
def test_whatever_the_order_everybody_is_served(data):
    """Any chunks of any peers that end in any order: none waits for ever."""
    pool = StagingPool(100, lambda size: torch.zeros(size, dtype=torch.uint8))
    chunks = st.lists(st.integers(1, 50), min_size=1, max_size=4)
    left = {
        Reader(): (f"p{peer}", sizes)
        for peer in range(3)
        for sizes in data.draw(st.lists(chunks, max_size=3))
    }
    flights = []
    for _ in range(1000):
        for reader, (peer, sizes) in left.items():
            while sizes:
                space = take(pool, reader, peer, sizes[0])
                if space is None:
                    break
                sizes.pop(0)
                flights.append(space)
            if not sizes:
                leave(pool, reader)
        if not flights:
            break
        pool.give(flights.pop(data.draw(st.integers(0, len(flights) - 1))))
    assert not any(sizes for _, sizes in left.values())
    assert pool.taken_bytes == 0


def test_rounds_are_small_beside_the_pool():
    assert StagingPool(1 << 30, torch.zeros).chunk_bytes == 8 << 20
    assert StagingPool(1 << 30, torch.zeros, on_device=True).chunk_bytes == 32 << 20
    assert StagingPool(4096, torch.zeros).chunk_bytes == 1024


class _Reference:
    """The order of asking, spelt out: who asked before, and could take space now, goes first."""

    def __init__(self, size):
        self.size, self.queue, self.held, self.spaces = size, [], {}, {}

    def may_take(self, reader, peer, size):
        if reader not in [one for one, _ in self.queue]:
            self.queue.append((reader, peer))
        for other, of in self.queue:
            if other is reader:
                break
            if of == peer or not self.held.get(of):
                return False
        held, left = self.held.get(peer, 0), self.size - sum(self.held.values()) - size
        return not held or left >= held + size

    def leave(self, reader):
        self.queue = [one for one in self.queue if one[0] is not reader]


@given(st.data())
def test_the_order_is_that_of_asking_whatever_is_taken_given_and_left(data):
    pool = StagingPool(100, lambda size: torch.zeros(size, dtype=torch.uint8))
    reference, spaces = _Reference(100), []
    readers = [(Reader(), f"p{number % 3}") for number in range(7)]
    for _ in range(40):
        what = data.draw(st.sampled_from(["take", "take", "take", "give", "leave", "drop"]))
        number = data.draw(st.integers(0, len(readers) - 1))
        reader, peer = readers[number]
        if what == "take":
            size = data.draw(st.integers(1, 60))
            before = pool.taken_bytes
            may = reference.may_take(reader, peer, size)
            space = take(pool, reader, peer, size)
            assert may or space is None, "it went before its turn"
            # First fit may have no room in one piece.
            assert space is not None or not may or before + size > 100 or len(spaces) > 0
            if space is not None:
                reference.held[peer] = reference.held.get(peer, 0) + size
                spaces.append((space, peer))
        elif what == "give" and spaces:
            space, peer = spaces.pop(number % len(spaces))
            pool.give(space)
            reference.held[peer] -= space.end - space.start
        elif what == "leave":
            leave(pool, reader)
            reference.leave(reader)
        elif what == "drop":
            leave(pool, reader)
            reference.leave(reader)
            readers[number] = Reader(), peer
    assert pool.taken_bytes == sum(space.end - space.start for space, _ in spaces)


def test_who_is_first_is_told_so(pool):
    first, second, other = Reader(), Reader(), Reader()
    held = take(pool, first, "p", 80)
    assert take(pool, first, "p", 30) is None
    assert take(pool, second, "p", 30) is None
    assert take(pool, other, "q", 30) is None
    assert [one.turn.is_first for one in (first, second, other)] == [True, False, True]
    pool.called = deque()
    leave(pool, first)
    assert second.turn.is_first
    assert list(pool.called) == [id(second)]
    leave(pool, second)
    pool.give(held)
    assert take(pool, other, "q", 30) is not None


def test_nothing_is_kept_of_readers_and_peers_that_are_gone(pool):
    for number in range(50):
        reader = Reader()
        space = take(pool, reader, f"p{number}", 10)
        pool.give(space)
        leave(pool, reader)
    take(pool, Reader(), "q", 10)
    assert len(pool._queues) + len(pool._owner) <= 2


def test_a_pool_for_which_there_is_too_little_memory_is_smaller(caplog):
    sizes = []

    def make(size_bytes):
        sizes.append(size_bytes)
        if size_bytes > 40:
            raise torch.OutOfMemoryError("no memory left")
        return torch.zeros(size_bytes, dtype=torch.uint8)

    pool, reader = StagingPool(100, make), Reader()
    space = take(pool, reader, "P", 20)
    assert (sizes, pool.size_bytes, len(pool.memory(space))) == ([100, 50, 25], 25, 20)
    assert "no memory for a staging pool of 100 bytes" in caplog.text
    pool.give(space)
    leave(pool, reader)
    with pytest.raises(PoolExhausted, match="a chunk needs 26 bytes"):
        take(pool, Reader(), "Q", 26)


def test_a_pool_is_not_made_smaller_than_a_chunk():
    def make(size_bytes):
        raise torch.OutOfMemoryError(f"no {size_bytes} bytes left")

    pool = StagingPool(100, make)
    with pytest.raises(torch.OutOfMemoryError, match="no 50 bytes"):
        take(pool, Reader(), "P", 30)
    assert pool.size_bytes == 50
