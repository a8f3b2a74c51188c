"""When an engine looked at its reads; the clock is a fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvpatch.transfer import looks as looks_module
from kvpatch.transfer.agent_gate import AgentGate
from kvpatch.transfer.background_read import BackgroundRead
from kvpatch.transfer.lifetime import Lifetime
from kvpatch.transfer.looks import Looks
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.transfer.unposted import Unposted

from .staged_world import DRAM

pytestmark = pytest.mark.patching


class Clock:
    """Fake: stands still until it is put on; counts who asks."""

    def __init__(self) -> None:
        self.now, self.asked = 100.0, 0

    def monotonic(self) -> float:
        self.asked += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(looks_module, "time", made)
    return made


class _Thread(ProgressThread):
    """Fake: a thread that runs and takes up nothing."""

    def __init__(self) -> None:
        pool = StagingPool(4096, lambda size: torch.empty(size, dtype=torch.uint8))
        super().__init__(pool, torch.device("cpu"), AgentGate())
        self.is_running = True

    def add(self, read: StagedRead) -> None:
        """Does nothing."""

    def drop(self, read: StagedRead) -> None:
        """Does nothing."""


class _Caches:
    """Fake."""

    def mark(self) -> None:
        """No device."""


@pytest.fixture
def make(clock: Clock) -> Callable[[float], BackgroundRead]:
    thread = _Thread()

    def read(longest_gap: float) -> BackgroundRead:
        caches: Any = _Caches()
        unposted = Unposted((), iter(()))
        staged = StagedRead(
            object(), thread._pool, caches, Ends(DRAM, DRAM, "P"), b"", unposted, is_paced=True
        )
        staged.lease.lifetime = Lifetime(longest_gap=longest_gap)
        return BackgroundRead(staged, thread)

    return read


def test_a_step_asks_the_clock_once_for_all_its_reads(clock, make):
    reads = [make(10.0) for _ in range(50)]
    for read in reads:
        read.start()
    looks = reads[0]._looks
    for _ in range(5):
        clock.now += 1
        clock.asked = 0
        assert {read.state() for read in reads} == {"PROC"}
        assert clock.asked == 1
        assert looks.at == clock.now


def test_one_that_comes_and_one_that_goes_change_nothing(clock, make):
    reads = [make(10.0) for _ in range(3)]
    for read in reads:
        read.start()
    looks = reads[0]._looks
    for step in range(12):
        clock.now += 1
        if step % 2:
            reads.append(make(10.0))
            reads[-1].start()
        if step % 3 == 0:
            reads.pop(0)
        for read in reads if step % 4 else reversed(reads):
            read.state()
        assert looks.at == clock.now
    assert not any(read._read.lease.was_away for read in reads)


def test_who_was_read_for_while_the_engine_was_away_knows_it(clock, make):
    first, patient = make(2.0), make(float("inf"))
    for read in (first, patient):
        read.start()
    clock.now += 1.9
    first.state()
    assert not first._read.lease.was_away, "negative control"
    clock.now += 2.1
    later = make(2.0)
    later.start()  # before the engine looks at the first again
    assert first._read.lease.was_away
    first.state()
    later.state()
    patient.state()
    assert first._read.lease.was_away, "it stays so"
    assert not later._read.lease.was_away
    assert not patient._read.lease.was_away


def test_an_absence_is_booked_before_the_look_that_ends_it(clock):
    """The thread that finds the engine back finds that it was away."""
    found = []

    class _Watched(Looks):
        def __setattr__(self, name: str, value: Any) -> None:
            found.append(name)
            super().__setattr__(name, value)

    looks = _Watched()
    looks.allow(1.0)
    clock.now += 2
    found.clear()
    looks.book()
    assert found == ["absences", "at"]
