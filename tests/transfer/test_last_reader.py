"""Two reads of one answer of P's: the last one tells it, whatever becomes of either."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator

import pytest
import wrapt

from kvpatch.connector.handshake.remote_ranks import RemoteRank
from kvpatch.connector.reading.prepared_transfers import Reading
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.last_reader import LastReaders
from kvpatch.transfer.nixl import errors_of
from kvpatch.transfer.read_times import Metered, ReadTimes, Stopwatch
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.transfer.unposted import Unposted
from tests.transfer.staged_world import Failing, World, connected_world, finish, notifications

P, MESSAGE = "P", b"a:1"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with connected_world() as world:
        yield world


def _reads(world: World, readers: LastReaders, *agents: object):
    pool = world.pool(1 << 20)
    found = [world.read(pool, agent) for agent in agents]
    for read in found:
        read.end_telling = readers.begin(world.ends.agent, b"done")
    return found


def _of_nothing(world: World, pool: StagingPool, notification: bytes) -> StagedRead:
    caches, nothing = Caches({"a": world.target}), Unposted(iter(()), iter(()))
    return StagedRead(world.decode, pool, caches, world.ends, notification, nothing)


def test_the_last_of_two_tells(world):
    first, second = _reads(world, LastReaders(), None, None)
    first.start()
    assert finish(first) == ["DONE"]
    assert notifications(world) == []
    second.start()
    assert finish(second) == ["DONE"]
    assert notifications(world) == [b"done"]
    assert world.is_identical()


def test_one_that_fails_last_tells_of_the_other(world):
    first, second = _reads(world, LastReaders(), None, Failing(world.decode, 0))
    first.start()
    second.start()
    assert finish(first) == ["DONE"]
    assert finish(second) == ["ERR"]
    assert notifications(world) == [b"done"]
    second.release()


def test_one_that_is_released_last_tells_of_the_other(world):
    first, second = _reads(world, LastReaders(), None, None)
    first.start()
    assert finish(first) == ["DONE"]
    second.release()
    second.release()
    assert notifications(world) == [b"done"]


def test_one_that_is_forgotten_last_tells_of_the_other(world):
    first, *rest = _reads(world, LastReaders(), None, None)
    first.start()
    assert finish(first) == ["DONE"]
    rest.clear()
    gc.collect()
    assert notifications(world) == [b"done"]


def test_nobody_is_told_where_none_has_read(world):
    first, second = _reads(world, LastReaders(), None, Failing(world.decode, 0))
    first.release()
    second.start()
    assert finish(second) == ["ERR"]
    assert notifications(world) == []
    second.release()


@pytest.mark.parametrize("how", ["done", "failed", "given up"])
def test_a_rank_of_which_nothing_is_read_is_told_after_the_read_of_another(world, how):
    pool = world.pool(1 << 20)
    other = world.read(pool, Failing(world.decode, 0) if how == "failed" else None)
    other._notification = b""
    idle = _of_nothing(world, pool, b"idle")
    idle.idle_until = other.fate
    idle.start()
    assert [idle.state() for _ in range(3)] == ["PROC"] * 3
    assert notifications(world) == []
    other.start()
    if how == "given up":
        assert idle.void()
        assert finish(idle) == ["ERR"]
        assert finish(other) == ["DONE"]
    else:
        assert finish(other) == ["ERR" if how == "failed" else "DONE"]
        assert finish(idle) == ["DONE"]
    assert notifications(world) == [b"idle"]
    other.release()
    idle.release()


def test_a_read_of_nothing_that_waits_for_none_fails(world):
    """The negative control: nothing to read is an error but for who is only told."""
    pool = world.pool(1 << 20)
    read = _of_nothing(world, pool, b"none")
    read.start()
    assert finish(read) == ["ERR"]
    assert notifications(world) == []
    read.release()


def test_what_somebody_else_tells_is_left_to_those_that_go_on():
    readers = LastReaders()
    assert not readers.leave(P, MESSAGE)
    end = readers.begin(P, MESSAGE)
    assert readers.leave(P, MESSAGE)
    assert not readers.leave(P, b"b:1")
    assert not readers.leave("Q", MESSAGE)
    assert end(False), "it has read nothing, but the other one is through with it"
    assert not end(True)
    assert not readers.leave(P, MESSAGE)


@pytest.mark.parametrize("seed", range(20))
def test_one_of_any_number_tells_and_it_is_the_last(seed):
    """Which have read, and in which order they end, is drawn; they end on threads of their own."""
    draw = random.Random(seed)
    readers = LastReaders()
    ends = [readers.begin(P, MESSAGE) for _ in range(draw.randint(1, 8))]
    have_read = [draw.random() < 0.5 for _ in ends]
    told: list[bool] = []
    threads = [
        threading.Thread(target=lambda end=end, has=has: told.append(end(has)))
        for end, has in zip(ends, have_read, strict=True)
    ]
    draw.shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(told) == any(have_read)
    assert not readers.leave(P, MESSAGE), "nothing is kept of what is over"
    assert not readers._open
    assert not readers._owed


def test_a_read_that_is_collected_as_another_begins_is_not_left_in_the_books():
    """It ends on the same thread, inside: between any two steps of the sum of the other."""
    readers = LastReaders()
    end_first = readers.begin(P, MESSAGE)

    class Ending(dict):
        def setdefault(self, key, default=None):
            found = super().setdefault(key, default)
            readers._open = dict(self)
            assert end_first(True)  # alone until now, it tells
            return found

    readers._open = Ending(readers._open)
    end = readers.begin(P, MESSAGE)

    assert end(True), "nobody else is left to tell it"
    assert not readers._open


def test_how_long_others_take_is_measured_beside_a_rank_of_which_nothing_is_read(world):
    pool, times, stopwatch = world.pool(1 << 20), ReadTimes(), Stopwatch()
    other = world.read(pool)
    other._notification = b""
    idle = _of_nothing(world, pool, b"idle")
    idle.idle_until = other.fate
    for read in (other, idle):
        read.metered = Metered(times, stopwatch)
        read.start()

    assert finish(other) == ["DONE"]
    assert finish(idle) == ["DONE"]

    assert not stopwatch._is_spoiled
    assert notifications(world) == [b"idle"]


class _NotReleased(wrapt.ObjectProxy):
    """A real agent that does not let go of a transfer (a stand-in for one that NIXL still uses)."""

    def release_xfer_handle(self, handle):
        raise self.error("busy")


def test_one_that_cannot_be_let_go_tells_of_the_other(world):
    first, second = _reads(world, LastReaders(), None, None)
    first.start()
    assert finish(first) == ["DONE"]
    stuck = _NotReleased(world.decode)
    stuck.error = errors_of(world.decode)[0]
    second._failed_handles.append(object())
    second._nixl = stuck
    second.let_go()
    assert notifications(world) == [b"done"]
    second._failed_handles.clear()


def test_ranks_are_read_behind_those_that_came_before_them_however_often():
    reading = Reading(None, None)
    one, other = (RemoteRank(None, (), ()) for _ in range(2))

    behind = [reading.taken_before(rank) for rank in (one, other, one, other)]

    assert behind == [(), (one,), (), (one,)]
