"""P's word on its blocks, over real NIXL, two agents in one process; what fails is labelled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import wrapt
from nixl._bindings import nixlBackendError

from kvpatch.checks import hold_check as check_module
from kvpatch.checks.hold_check import HoldCheck
from kvpatch.checks.tables import (
    _SLOTS,
    MOST_MISSED,
    PAUSE_SECONDS,
    WORD_BYTES,
    HoldTable,
    generation_of,
)
from kvpatch.core.errors import PeerRefused
from kvpatch.observe.catalogue import CheckResult
from kvpatch.transfer.lease import Lease, Lifetime
from kvpatch.transfer.own_read import OwnRead
from kvpatch.transfer.progress_thread import BackgroundRead

from .staged_world import (
    SECONDS,
    Engine,
    Failing,
    Tables,
    connected_world,
    finish,
    is_told_nothing,
    notifications,
    stays,
)

pytestmark = pytest.mark.lab

START = 0xFFFFFFFF
FIRST, SECOND, LATER = (generation_of(START, count) for count in (1, 2, 1 + _SLOTS))


class HoldTables(Tables):
    """Tables of holds."""

    def check(self, generation: int = FIRST, age_seconds: float = 0.0) -> HoldCheck:
        """Of a request that came in so long ago."""
        vouched = time.monotonic() - age_seconds
        agent = self.world.ends.agent
        return HoldCheck(self.decode, agent, self.prefill.address, generation, vouched)

    def ask(self, generation: int = FIRST) -> bool:
        """What P's table says now."""
        return bool(self.until_known(self.check(generation).answer))


@pytest.fixture
def tables() -> Iterator[HoldTables]:
    with connected_world(HoldTable) as world:
        yield HoldTables(*world.kept, world)


@pytest.mark.parametrize(
    ("heard", "said"),
    [
        ([("a", FIRST)], [(FIRST, True), (FIRST, True)]),
        ([("a", FIRST), ("a", 0), ("a", 0), ("of nobody", 0)], [(FIRST, False)]),
        ([("a", FIRST), ("a", SECOND)], [(FIRST, False), (SECOND, True)]),  # other blocks
        ([("a", generation_of(7, 5))], [(generation_of(START, 5), False)]),  # P has started again
        ([("a", FIRST), ("b", LATER)], [(FIRST, False)]),  # in the same place
        ([("a", FIRST), ("b", LATER), ("a", 0)], [(LATER, True)]),
    ],
)
def test_a_word_stands_until_it_is_ended(tables, heard, said):
    for request, generation in heard:
        tables.prefill.hear({request: generation})
    for generation, stands in said:
        assert tables.ask(generation) == stands


def test_a_word_that_is_not_written_yet_is_waited_for(tables):
    """P's scheduler may answer before its worker has heard of a step."""
    check, agent = tables.check(LATER), tables.world.decode
    stays(lambda: check.answer(agent), None)
    tables.prefill.hold("an earlier one", FIRST)
    stays(lambda: check.answer(agent), None)
    tables.prefill.hold("a", LATER)
    assert tables.until_known(check.answer)


def test_a_word_that_never_comes_is_that_of_a_p_that_has_started_anew(tables, monkeypatch):
    monkeypatch.setattr(check_module, "_MOST_POLLS", 20)
    assert not tables.ask()


def test_a_turns_word_may_come_behind_a_long_step_of_d(tables, monkeypatch):
    """D writes it with the next step, and a step may take seconds that is under way."""
    monkeypatch.setattr(check_module, "_MOST_POLLS", 3)
    check = replace(tables.check(), is_read_back=True)
    for _ in range(50):
        assert check.answer(tables.world.decode) is None
        time.sleep(PAUSE_SECONDS)
    tables.prefill.hold("a", FIRST)
    assert tables.until_known(check.answer)


def test_a_freeze_of_any_length_fails_no_word_that_comes_behind_it(tables, monkeypatch):
    """Made up: the clock of a process that was stopped for an hour."""
    check, clock = tables.check(), time.monotonic
    while check._asked is None or check._handle is not None:
        assert check.answer(tables.world.decode) is None
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600.0)
    assert check.answer(tables.world.decode) is None
    tables.prefill.hold("a", FIRST)
    assert tables.until_known(check.answer)


class Silent(wrapt.ObjectProxy):
    """Fake: a peer that never answers."""

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        return "PROC"


def test_words_of_one_step_share_the_time_for_which_they_hold_it(tables, monkeypatch):
    """Made up: a clock that goes on by some 0.01 ms each time that it is read, without rounding."""
    looks, now, state = [], [math.ceil(time.monotonic())], "check_xfer_state"
    silent = Silent(tables.world.decode)

    def read_clock():
        now[0] += 2**-17
        return now[0]

    monkeypatch.setattr(time, "monotonic", read_clock)
    monkeypatch.setattr(Silent, state, lambda _, handle: looks.append(handle) or "PROC")

    def step(reads):
        looks.clear()
        for check in [tables.check() for _ in range(reads)]:
            assert check.answer(silent) is None
            check.release(silent)
        return len(looks)

    alone = step(1)
    assert 5 < alone <= 14
    now[0] += PAUSE_SECONDS
    assert 50 <= step(50) < 50 + 4 * alone, "one look each, and the time of a step between them"
    now[0] += PAUSE_SECONDS
    assert step(1) == alone


def test_what_is_on_its_way_is_waited_for_until_the_lease_is_over(tables, monkeypatch):
    """P may be stopped for long, as its host is moved."""
    monkeypatch.setattr(check_module, "_MOST_POLLS", 3)
    check, silent = tables.check(), Silent(tables.world.decode)
    for _ in range(12):
        assert check.answer(silent) is None
        time.sleep(PAUSE_SECONDS)
    check.ends = time.monotonic() - 3600.0
    assert check.answer(silent) is None, "not by the first poll behind that"
    with pytest.raises(PeerRefused, match="its lease is over"):
        for _ in range(12):
            time.sleep(PAUSE_SECONDS)
            assert check.answer(silent) is None
    check.release(silent)


def test_no_place_for_a_word_is_ever_lost(tables, monkeypatch):
    """Neither by good answers nor by those that are given up on their way."""
    monkeypatch.setattr("kvpatch.checks.tables._SPIN_SECONDS", 0.0)
    tables.prefill.hold("a", FIRST)
    silent = Silent(tables.world.decode)
    for _ in range(HoldTable.landings // 8):
        given_up = tables.check()
        assert given_up.answer(silent) is None
        given_up.release(silent)
        assert tables.ask()
    places = {tables.decode.take_landing() for _ in range(HoldTable.landings)}
    assert len(places) == HoldTable.landings
    assert None not in places
    assert tables.decode.take_landing() is None


class Reads(Engine):
    """Reads of the world's request whose blocks P holds by a word, in a thread or in steps."""

    is_paced: bool

    def make(
        self, check: HoldCheck, agent: object = None, **how: object
    ) -> tuple[OwnRead, Lifetime]:
        read = self.staged(agent, **how)
        read.lifetime = Lifetime(checks=(check,))
        return BackgroundRead(read, self.thread) if self.is_paced else read, read.lifetime


@pytest.fixture(params=[True, False], ids=["in the thread", "in steps"])
def reads(request: pytest.FixtureRequest, tables: HoldTables) -> Iterator[Reads]:
    made = Reads(tables.world, 1 << 20)
    made.is_paced = request.param
    yield made
    made.stop()


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_read_is_done_once_p_has_said_that_it_held_the_blocks(reads, tables, is_direct):
    read, lifetime = reads.make(tables.check(), is_direct=is_direct)
    read.start()
    stays(read.state, "PROC", 0.05)  # P's worker has not heard of it
    assert is_told_nothing(reads.world), "and is not told before it has said so"
    assert lifetime.verdict is None
    tables.prefill.hold("a", FIRST)
    assert finish(read) == ["DONE"]
    assert reads.world.is_identical()
    assert notifications(reads.world) == [b"done"]
    assert lifetime.verdict is CheckResult.HELD
    read.release()


class _EndsWhenRead(wrapt.ObjectProxy):
    """P gives the blocks away right after the last transfer of data has been posted."""

    def __init__(self, agent: object, end: Callable[[], None]) -> None:
        super().__init__(agent)
        self._self_end = end

    def transfer(self, handle):
        state = self.__wrapped__.transfer(handle)
        self._self_end()
        return state


@pytest.mark.parametrize("is_direct", [True, False])
def test_blocks_that_are_given_away_during_the_read_fail_it(reads, tables, is_direct, caplog):
    tables.prefill.hold("a", FIRST)
    agent = _EndsWhenRead(reads.world.decode, lambda: tables.prefill.end("a"))
    read, lifetime = reads.make(tables.check(), agent, is_direct=is_direct)
    told: list[object] = []
    lifetime.fail_check = lambda: told.append(read)
    read.start()
    assert finish(read) == ["ERR"]
    assert "let go of a request's blocks before they had all been read" in caplog.text
    assert is_told_nothing(reads.world), "P keeps no such request"
    assert lifetime.verdict is CheckResult.GONE
    assert told == [read]
    assert reads.pool.taken_bytes == 0
    read.release()


class Wordless(wrapt.ObjectProxy):
    """Fake: an agent without a transport between host memories, for words alone."""

    def __init__(self, agent: object, how: str) -> None:
        super().__init__(agent)
        self._self_how, self._self_words = how, []

    def _state(self, handle, state):
        return "ERR" if any(handle is one for one in self._self_words) else state

    def get_xfer_descs(self, descs, kind):
        made = self.__wrapped__.get_xfer_descs(descs, kind)
        if descs[0][1] == WORD_BYTES:
            self._self_words.append(made)
        return made

    def initialize_xfer(self, operation, ours, theirs, *args):
        handle = self.__wrapped__.initialize_xfer(operation, ours, theirs, *args)
        if self._state(theirs, "") == "ERR":
            if self._self_how == "cannot be prepared":
                raise nixlBackendError("no transport")
            self._self_words.append(handle)
        return handle

    def check_xfer_state(self, handle):
        return self._state(handle, self.__wrapped__.check_xfer_state(handle))

    def transfer(self, handle):
        return self._state(handle, self.__wrapped__.transfer(handle))


@pytest.mark.parametrize("how", ["cannot be prepared", "fails"])
def test_a_peer_whose_word_alone_cannot_be_read_is_asked_no_more(reads, tables, how, caplog):
    """Its loads are unproven, as those of a P without kvpatch; one is warned of."""
    tables.prefill.hold("a", FIRST)
    peer = (reads.world.ends.agent, tables.prefill.address)
    for _ in range(MOST_MISSED):
        assert tables.decode.missed[peer] < MOST_MISSED
        reads.world.target.zero_()
        agent = Wordless(reads.world.decode, how)
        # Far from old, however busy the machine: else the word is asked for before the data.
        read, lifetime = reads.make(tables.check(age_seconds=-SECONDS), agent)
        read.start()
        assert finish(read) == ["DONE"]
        assert reads.world.is_identical()
        assert lifetime.verdict is None
        assert notifications(reads.world) == [b"done"]
        read.release()
    assert tables.decode.missed == {peer: MOST_MISSED}
    warned = [one for one in caplog.records if "are not proven" in one.getMessage()]
    assert [one.levelname for one in warned].count("WARNING") == 1
    assert tables.ask()
    assert not tables.decode.missed, "one that is heard again is asked again"
    assert len(tables.decode._free) == HoldTable.landings


@pytest.mark.parametrize(
    ("has_word", "verdict"),
    [
        (True, CheckResult.HELD),
        (True, CheckResult.GONE),
        (False, None),
        (False, CheckResult.EXPIRED),
    ],
)
def test_what_was_long_on_its_way_asks_before_anything_is_read(reads, tables, has_word, verdict):
    """And where P gives no word the lease decides in its place."""
    world, told = reads.world, []
    tables.prefill.hold("a", FIRST)
    if verdict is CheckResult.GONE:
        tables.prefill.end("a")
    before, agent = world.target.clone(), None if has_word else Wordless(world.decode, "fails")
    read, lifetime = reads.make(tables.check(age_seconds=2.0), agent)
    is_over = verdict is CheckResult.EXPIRED
    lifetime.lease = Lease(time.monotonic() + (-1 if is_over else SECONDS))
    lifetime.fail_check = lambda: told.append(read)
    read.start()
    is_well = verdict in (CheckResult.HELD, None)
    assert finish(read) == ["DONE" if is_well else "ERR"]
    assert lifetime.verdict is verdict
    assert told == ([] if is_well else [read])
    assert world.is_identical() if is_well else torch.equal(world.target, before)
    read.release()


def test_data_that_cannot_be_read_fails_whatever_becomes_of_the_word(reads, tables):
    """P is dead: nothing is counted against its word, and no check has failed."""
    told = []
    agent = Failing(Wordless(reads.world.decode, "fails"), after=0)
    read, lifetime = reads.make(tables.check(age_seconds=2.0), agent)
    lifetime.fail_check = lambda: told.append(read)
    read.start()
    assert finish(read) == ["ERR"]
    assert not told
    assert not tables.decode.missed
    read.release()


def test_a_read_that_is_given_up_does_not_wait_for_the_word(reads, tables):
    read, lifetime = reads.make(tables.check())
    read.start()
    stays(read.state, "PROC")
    assert read.void()
    assert finish(read) == ["ERR"]
    assert lifetime.verdict is None
    read.release()
    assert reads.pool.taken_bytes == 0
