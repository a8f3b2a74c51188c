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


@pytest.mark.parametrize(
    ("granted", "sent", "end"),
    [
        (130.0, [], 130.0),
        (130.0, [101.0], 130.0),  # it lasts longer without
        (130.0, [115.0], 135.0),
        (130.0, range(105, 500, 5), 515.0),
        # D was held up, and sends heartbeats again: P has let go of the blocks meanwhile.
        (130.0, [131.0], 130.0),
        (130.0, [105.0, 110.0, 170.0, 175.0], 130.0),
        (190.0, [105.0, 110.0, 170.0, 175.0], 195.0),  # a lease that is new, behind that gap
    ],
)
def test_a_lease_is_extended_by_heartbeats_until_it_has_run_out(granted, sent, end):
    beats = Heartbeats(_EXTENSION)
    for when in sent:
        beats.send(when)
    assert Lease(granted, beats).end == end
    assert Lease(granted).end == granted
    assert Lease().end == inf


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


@pytest.mark.parametrize(
    ("taken", "passes", "waited"),
    [
        ([(0, 0)], 0, {0: 0, 50: 50}),
        # Where no scheduler of vLLM's takes them, the first one counts as none.
        ([], 0, {7: 0, 57: 50}),
        ([(0, 0)], 500, {500: 500}),  # the first in a long queue
        # The API server's clock is behind by so much; the last requests tell how far at most.
        *(([(0, by), (0, by + 7)], 0, {by: 0, by + 50: 50}) for by in (3600, 0.25, -3600)),
        # A clock that is set makes no load late for good.
        *(([(0, 0), *[(1, by)] * 16], 0, {by: 0, by + 50: 50}) for by in (3600, -3600)),
        # What comes all at once behind a stall has waited.
        ([*[(5, 0.002)] * 3, (40, 40), *[(0, 40)] * 39], 0, {40: 39.998}),
    ],
)
def test_a_request_has_waited_since_d_was_given_it(clock, taken, passes, waited):
    """By other requests that a scheduler took: (seconds since the last one, its arrival's age)."""
    waits = Waits()
    for seconds, age in taken:
        clock.now += seconds
        waits.take(clock.time() - age)
    clock.now += passes
    for age, expected in waited.items():
        assert waits.since(clock.time() - age) == pytest.approx(expected, abs=1e-6)


def test_a_worker_counts_what_a_message_has_waited_for_it(clock, monkeypatch):
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
