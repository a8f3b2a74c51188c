"""What a peer's reads took, over real NIXL; and what the stopwatch does not count."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest

from kvpatch.geometry.direct_or_staged import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    Costs,
    direct_seconds,
    staged_seconds,
)
from kvpatch.geometry.measured_costs import Timed
from kvpatch.transfer import read_times
from kvpatch.transfer.read_times import Metered, ReadTimes, Stopwatch

from .staged_world import Failing, World, finish
from .test_progress_thread import Engine, make

__all__ = ["make"]
pytestmark = pytest.mark.lab

MIB = 1 << 20


def times_of(*reads: Timed, is_direct: bool = False) -> ReadTimes:
    times = ReadTimes()
    for read in reads:
        times.add(read, is_direct=is_direct)
    return times


def took(times: ReadTimes) -> tuple[list[Timed], list[Timed]]:
    """What was booked: (direct, staged)."""
    return [one for _, one in times._direct], [one for _, one in times._staged]


def meter(times: ReadTimes, stopwatch: Stopwatch, size: int = MIB, way: str = "direct") -> Metered:
    read = Metered(times, stopwatch)
    read.begin()
    read.post(2, size, is_direct=way == "direct")
    return read


def test_nothing_was_read():
    assert ReadTimes().costs(HOST_MEMORY) is HOST_MEMORY


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_few_recent_ones_of_each_way_are_kept(is_direct):
    slow, fast = Timed(2, MIB, 1.0), Timed(2, MIB, 1e-3)
    found = [slow, *[fast] * 9, *[slow] * 5]
    times = times_of(*found, is_direct=is_direct)
    assert took(times)[not is_direct] == [slow] * 5
    assert times.costs(HOST_MEMORY) == times_of(*[slow] * 3, is_direct=is_direct).costs(HOST_MEMORY)
    assert times.costs(HOST_MEMORY) != HOST_MEMORY


def test_two_do_not_count_yet():
    assert times_of(*[Timed(2, MIB, 1.0)] * 2).costs(HOST_MEMORY) == HOST_MEMORY


def test_small_reads_say_nothing_of_bytes():
    assert took(times_of(Timed(2, MIB - 1, 1.0), Timed(1023, 1, 1.0))) == ([], [])
    assert took(times_of(Timed(2, MIB, 1.0), Timed(1024, 1, 1.0)))[1] != [], "negative control"


def test_a_way_that_was_slower_may_be_tried_again(monkeypatch):
    times = times_of(*[Timed(2, MIB, 1.0)] * 3)
    assert times.costs(HOST_MEMORY) != HOST_MEMORY
    monkeypatch.setattr(read_times, "_EXPIRE_SECONDS", 0.0)
    assert times.costs(HOST_MEMORY) == HOST_MEMORY


def test_reads_at_the_same_time_are_timed_as_one():
    times, stopwatch = ReadTimes(), Stopwatch()
    first, second = meter(times, stopwatch), meter(times, stopwatch)
    first.copy_seconds = second.copy_seconds = 0.25
    time.sleep(0.02)
    first.end(is_well=True)
    assert took(times) == ([], []), "another one is under way"
    time.sleep(0.02)
    second.end(is_well=True)
    second.end(is_well=True)
    ((found,), _) = took(times)
    assert (found.runs, found.size_bytes, found.copy_seconds) == (4, 2 * MIB, 0.5)
    assert 0.04 <= found.seconds < 10
    third = meter(times, stopwatch)
    third.end(is_well=True)
    assert took(times)[0][1].size_bytes == MIB, "each time anew"


def test_of_two_ways_or_two_peers_nobody_can_tell():
    one, other, stopwatch = ReadTimes(), ReadTimes(), Stopwatch()
    for pair in (
        (meter(one, stopwatch), meter(one, stopwatch, way="staged")),
        (meter(one, stopwatch), meter(other, stopwatch)),
    ):
        for read in pair:
            read.end(is_well=True)
    both = meter(one, stopwatch)
    both.post(1, MIB, is_direct=False)
    both.end(is_well=True)
    assert took(one) == took(other) == ([], [])
    meter(one, stopwatch).end(is_well=True)
    assert took(one) != ([], []), "negative control"


def test_what_failed_or_never_began_is_not_counted():
    times, stopwatch = ReadTimes(), Stopwatch()
    well, failed = meter(times, stopwatch), meter(times, stopwatch)
    failed.end(is_well=False)
    well.end(is_well=True)
    Metered(times, stopwatch).end(is_well=True)
    nothing = Metered(times, stopwatch)
    nothing.begin()
    nothing.end(is_well=True)
    assert took(times) == ([], [])


def test_an_engine_that_always_reads_is_measured_too():
    times, stopwatch = ReadTimes(), Stopwatch()
    going = [meter(times, stopwatch), meter(times, stopwatch)]
    for _ in range(40):
        going.append(meter(times, stopwatch))
        going.pop(0).end(is_well=True)
    (found, _) = took(times)
    assert len(found) == 2
    assert found[0].size_bytes == 16 * MIB
    for one in going:
        one.end(is_well=True)
    assert not stopwatch._going


class Clock:
    """Seconds that a test makes pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Wire(NamedTuple):
    """What reads of 64 MB really take, in runs of ``run_bytes`` or with ``landed`` of each byte."""

    run_bytes: int
    landed: int
    run_seconds: float
    bytes_per_second: float
    copies_per_second: float

    def seconds(self, is_direct: bool) -> float:
        size = 64e6
        if is_direct:
            return size / self.run_bytes * self.run_seconds + size / self.bytes_per_second
        return size * self.landed / self.bytes_per_second + size / self.copies_per_second


def ways_of(start: Costs, wire: Wire, every: float, clock: Clock) -> list[bool]:
    """How reads that come so often are read, one after another; they share the wire."""
    size, times, stopwatch = 64e6, ReadTimes(), Stopwatch()
    runs, blocks = int(size / wire.run_bytes), int(size * wire.landed / 65536)
    live: list[list[Any]] = []
    found: list[bool] = []
    following, step = 0.0, 0.02
    while clock.now < 100:
        if clock.now >= following:
            following = clock.now + (3.0 if len(found) < 4 else every)
            costs = times.costs(start)
            is_direct = direct_seconds(costs, runs, size) <= staged_seconds(
                costs, blocks, size * wire.landed, size
            )
            read = Metered(times, stopwatch, int(size))
            read.begin()
            landed = size if is_direct else size * wire.landed
            read.post(runs if is_direct else blocks, int(landed), is_direct=is_direct)
            read.copy_seconds = 0.0 if is_direct else size / wire.copies_per_second
            live.append([read, wire.seconds(is_direct)])
            found.append(is_direct)
        clock.now += step
        for one in live:
            one[1] -= step / len(live)
        for one in [one for one in live if one[1] <= 0]:
            live.remove(one)
            one[0].end(is_well=True)
    return found


@pytest.mark.parametrize(
    ("start", "wire", "every"),
    [
        (DEVICE_MEMORY, Wire(2048, 4, 20e-6, 1e9, 500e9), 0.5),
        (DEVICE_MEMORY, Wire(1024, 8, 10e-6, 3e9, 500e9), 0.4),
        (HOST_MEMORY, Wire(1024, 4, 8e-6, 1e9, 3e9), 0.4),
    ],
)
def test_a_slow_wire_does_not_lead_a_busy_engine_to_the_slower_way(
    monkeypatch, start: Costs, wire: Wire, every: float
):
    assert wire.seconds(is_direct=False) < 0.6 * wire.seconds(is_direct=True)
    clock = Clock()
    monkeypatch.setattr(read_times, "time", clock)
    found = ways_of(start, wire, every, clock)
    assert len(found) > 100
    assert sum(found) <= 3, "what was not tried is not believed to be better"


def test_a_busy_engine_leaves_a_way_that_turned_out_to_be_slower(monkeypatch):
    """It begins with the wrong one: runs take ten times what was thought."""
    clock = Clock()
    monkeypatch.setattr(read_times, "time", clock)
    found = ways_of(HOST_MEMORY, Wire(16384, 1, 40e-6, 3.5e9, 3e9), 0.4, clock)
    assert found[0], "negative control"
    assert not any(found[20:])


def read(engine: Engine, times: ReadTimes, watch: Stopwatch, *of: Any, **how: Any) -> list[str]:
    """Reads a request as a worker's progress thread does, metered."""
    found = engine.read(*of, **how)
    found._read.metered = Metered(times, watch)
    found.start()
    states = finish(found)
    found.release()
    return states


@pytest.fixture
def counts_all(monkeypatch) -> None:
    monkeypatch.setattr(read_times, "_LEAST_BYTES", 1)


@pytest.mark.parametrize("is_direct", [False, True])
def test_real_reads_are_metered(world: World, make, counts_all, is_direct: bool):
    engine, times, watch = make(1 << 20), ReadTimes(), Stopwatch()
    for _ in range(3):
        assert read(engine, times, watch, is_direct=is_direct) == ["DONE"]
    assert world.is_identical()
    found = took(times)[not is_direct]
    assert len(found) == 3
    assert took(times)[is_direct] == []
    assert all(one.size_bytes >= 300 * 2 * 2 * 16 * 2 * 3 for one in found)
    assert all(0 < one.seconds < 60 for one in found)
    assert all((one.copy_seconds == 0) is is_direct for one in found)
    assert isinstance(times.costs(HOST_MEMORY), Costs)
    assert times.costs(HOST_MEMORY) != HOST_MEMORY


def test_a_read_that_failed_or_was_given_up_is_not_metered(world: World, make, counts_all):
    engine, times, watch = make(1 << 20), ReadTimes(), Stopwatch()
    assert read(engine, times, watch, Failing(world.decode, 0)) == ["ERR"]
    given_up = engine.read()
    given_up._read.metered = Metered(times, watch)
    given_up.start()
    given_up.void()
    finish(given_up)
    given_up.release()
    del given_up
    assert took(times)[0] == []
    assert all(one.seconds > 0 for one in took(times)[1]), "it may have been done before"
    assert not watch._going, "and nothing of it is left"
    before = len(took(times)[1])
    assert read(engine, times, watch) == ["DONE"]
    assert len(took(times)[1]) == before + 1
