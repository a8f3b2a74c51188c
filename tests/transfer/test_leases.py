"""Leases by the clock, of peers that give no word: the clock is a fake, and NIXL may be."""

from __future__ import annotations

import pickle
import time
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.load import read_request
from kvpatch.load.read_request import ReadRequest, Waits, stated_end
from kvpatch.load.reader_attachment import leases_of
from kvpatch.transfer.lease import Heartbeats, Lease, Leases

pytestmark = pytest.mark.patching

_EXTENSION = 20.0


class Clock:
    """Fake: stands still until it is put on; both of Python's clocks, of one machine."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("kvpatch.load.read_request.time", made)
    return made


def _end_of(granted: float, *sent: float) -> float:
    beats = Heartbeats(_EXTENSION)
    for when in sent:
        beats.send(when)
    return Lease(granted, beats).end


class TestALease:
    def test_ends_as_granted_without_heartbeats(self) -> None:
        assert Lease(130.0).end == 130.0
        assert Lease().end == inf
        assert _end_of(130.0) == 130.0

    def test_is_extended_by_each_heartbeat(self) -> None:
        assert _end_of(130.0, 101.0) == 130.0, "it lasts longer without"
        assert _end_of(130.0, 115.0) == 135.0
        assert _end_of(130.0, *range(105, 500, 5)) == 515.0

    def test_that_has_run_out_is_extended_by_none(self) -> None:
        """D was held up, and sends heartbeats again: P has let go of the blocks meanwhile."""
        assert _end_of(130.0, 131.0) == 130.0
        assert _end_of(130.0, 105.0, 110.0, 170.0, 175.0) == 130.0

    def test_that_is_new_is_extended_behind_a_gap(self) -> None:
        assert _end_of(190.0, 105.0, 110.0, 170.0, 175.0) == 195.0


class TestHowLongPKeepsBlocks:
    def test_a_fixed_time(self) -> None:
        fixed = Leases(480.0, read_back_seconds=480.0)
        fixed.beat("P", 500.0)
        assert fixed.lease("P", 100.0) == Lease(580.0)
        assert fixed.lease("P", 100.0, is_read_back=True) == Lease(580.0)

    def test_a_lease_that_heartbeats_to_that_very_rank_extend(self) -> None:
        leases = Leases(30.0, _EXTENSION, 480.0)
        here, there = leases.lease("P", 100.0), leases.lease("another", 100.0)
        for when in range(105, 305, 5):
            leases.beat("P", float(when))
        assert here.end == leases.lease("P", 100.0).end == 320.0
        assert there.end == 130.0

    def test_an_earlier_turn_has_no_heartbeats(self) -> None:
        leases = Leases(30.0, _EXTENSION, 480.0)
        leases.beat("P", 105.0)
        assert leases.lease("P", 100.0, is_read_back=True) == Lease(580.0)

    def test_without_end_where_nobody_knows_when_the_request_came(self) -> None:
        assert Leases(480.0).lease("P", None) == Lease()

    def test_by_the_release_of_p(self) -> None:
        ours, old = Leases(40.0, _EXTENSION), Leases(456.0)

        assert ours.at(()) is ours
        assert old.at(()) is old
        assert ours.at(("0.25.1",)) is ours
        assert old.at(("0.20.2",)) is old
        assert ours.at(("0.20.2",)) == Leases(480.0)
        assert old.at(("0.33.0",)) == Leases(30.0)
        assert ours.at(("0.20.2", "0.33.0")) == Leases(30.0), "whichever it is"


@pytest.mark.parametrize("setting", [None, "soon", 10**400])
def test_a_setting_that_d_need_not_have(setting: Any) -> None:
    """vLLM looks at it where it keeps blocks itself, and a D that does not starts with it."""
    extra = {"decoder_kv_blocks_ttl": setting}
    transfer = SimpleNamespace(get_from_extra_config=extra.get)
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(kv_transfer_config=transfer), _lease_extension=20
    )
    assert leases_of(worker, FACTS["0.33.0"]) == Leases(30.0, 20.0, inf)


class TestAStatedExpiry:
    """Of a D that P reads an earlier turn back from; on its own clock, some time from ours."""

    @staticmethod
    def end_of(release: str, stated: Any, offset: float | None = 1000.0) -> float | None:
        entry = SimpleNamespace(remote=SimpleNamespace(blocks_expiry_time=stated))
        offsets = {} if offset is None else {"D": offset}
        worker = SimpleNamespace(_engine_clock_offset=offsets)
        return stated_end(worker, "D", entry, FACTS[release])

    def test_is_the_lease(self) -> None:
        end = self.end_of("0.33.0", time.perf_counter() + 1000.0 + 60.0)
        assert end == pytest.approx(time.monotonic() + 60.0, abs=30.0)

    def test_says_nothing_where_it_is_not_stated_or_not_to_be_placed(self) -> None:
        assert self.end_of("0.33.0", None) is None
        assert self.end_of("0.33.0", "soon") is None
        assert self.end_of("0.33.0", 1.0, offset=None) is None
        assert self.end_of("0.25.1", 1.0) is None, "that release states none"


class TestWhenDWasGivenARequest:
    def test_is_told_by_its_wait_in_the_scheduler(self, clock: Clock) -> None:
        waits = Waits()
        waits.take(clock.time())
        assert waits.since(clock.time()) == 0.0
        assert waits.since(clock.time() - 50.0) == 50.0

    def test_the_first_counts_as_none_where_no_scheduler_of_vllms_takes_it(self, clock):
        waits = Waits()
        assert waits.since(clock.time() - 7.0) == 0.0
        assert waits.since(clock.time() - 57.0) == pytest.approx(50.0)

    def test_the_first_in_a_long_queue_has_waited_too(self, clock: Clock) -> None:
        waits, arrival = Waits(), clock.time()
        waits.take(arrival)
        clock.now += 500.0
        assert waits.since(arrival) == 500.0

    @pytest.mark.parametrize("apart", [3600.0, 0.25, -3600.0])
    def test_clocks_of_two_machines_are_not_compared(self, clock: Clock, apart: float) -> None:
        """The API server's is behind by so much; the last requests tell how far at most."""
        waits = Waits()
        waits.take(clock.time() - apart)
        waits.take(clock.time() - apart - 7.0)
        assert waits.since(clock.time() - apart) == 0.0
        assert waits.since(clock.time() - apart - 50.0) == pytest.approx(50.0)

    @pytest.mark.parametrize("by", [3600.0, -3600.0])
    def test_a_clock_that_is_set_makes_no_load_late_for_good(self, clock: Clock, by: float) -> None:
        waits = Waits()
        waits.take(clock.time())
        for _ in range(16):
            clock.now += 1.0
            waits.take(clock.time() - by)
        assert waits.since(clock.time() - by) == 0.0
        assert waits.since(clock.time() - by - 50.0) == pytest.approx(50.0)

    def test_what_comes_all_at_once_behind_a_stall_has_waited(self, clock: Clock) -> None:
        waits = Waits()
        for _ in range(3):
            clock.now += 5.0
            waits.take(clock.time() - 0.002)
        clock.now += 40.0
        for _ in range(40):
            waits.take(clock.time() - 40.0)
        assert waits.since(clock.time() - 40.0) == pytest.approx(39.998)

    def test_a_worker_counts_what_a_message_has_waited_for_it(self, clock, monkeypatch):
        """It is behind a stall, and its machine was started before the scheduler's."""
        monkeypatch.setattr(read_request, "_MESSAGES", Waits(lambda: clock.now))
        apart = 7000.0

        def got_after(seconds: float) -> ReadRequest:
            message = pickle.dumps(ReadRequest(1, 1, ((1,),), ((1,),), waited=50.0))
            clock.now += apart + seconds
            got: ReadRequest = pickle.loads(message)
            return got

        assert got_after(0.001).arrived == pytest.approx(clock.now - 50.0)
        assert got_after(40.0).arrived == pytest.approx(clock.now - 89.999)
        assert ReadRequest(1, 1, ((1,),), ((1,),)).arrived is None
