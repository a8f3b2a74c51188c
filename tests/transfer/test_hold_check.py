"""P's word on its blocks, over real NIXL, two agents in one process; what fails is labelled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

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
from kvpatch.transfer.agent_gate import AgentGate, ProgressAgent
from kvpatch.transfer.lease import Lease, Lifetime
from kvpatch.transfer.progress_thread import BackgroundRead, ProgressThread
from kvpatch.transfer.staged_read import StagedRead

from .staged_world import (
    SECONDS,
    Failing,
    World,
    connected_world,
    finish,
    is_told_nothing,
    notifications,
)

pytestmark = pytest.mark.lab

START, OTHER_START = 0xFFFFFFFF, 7


@dataclass
class Tables:
    """P's table and D's."""

    prefill: HoldTable
    decode: HoldTable
    world: World

    def check(self, generation: int, age_seconds: float = 0.0) -> HoldCheck:
        """Of a request that came in so long ago."""
        vouched = time.monotonic() - age_seconds
        agent = self.world.ends.agent
        return HoldCheck(self.decode, agent, self.prefill.address, generation, vouched)

    def ask(self, generation: int) -> bool:
        """What P's table says now."""
        return answer(self.check(generation), self.world)


def answer(check: HoldCheck, world: World) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        found = check.answer(world.decode)
        if found is not None:
            return found
    raise TimeoutError


@pytest.fixture
def tables() -> Iterator[Tables]:
    with connected_world(HoldTable) as world:
        yield Tables(*world.kept, world)


def test_a_hold_stands_until_it_is_ended(tables):
    generation = generation_of(START, 1)
    tables.prefill.hold("a", generation)
    assert tables.ask(generation)
    assert tables.ask(generation), "it is asked as often as wanted"
    tables.prefill.end("a")
    assert not tables.ask(generation)
    tables.prefill.end("a")
    tables.prefill.end("of nobody")


def test_a_request_that_gets_other_blocks_has_another_word(tables):
    first, second = generation_of(START, 1), generation_of(START, 2)
    tables.prefill.hold("a", first)
    tables.prefill.hold("a", second)
    assert not tables.ask(first)
    assert tables.ask(second)


def test_the_word_of_an_engine_that_has_started_again_is_another(tables):
    tables.prefill.hold("a", generation_of(OTHER_START, 5))
    assert not tables.ask(generation_of(START, 5))


def test_a_later_request_in_the_same_place_ends_the_word_and_not_the_other_way_round(tables):
    first, later = generation_of(START, 3), generation_of(START, 3 + _SLOTS)
    tables.prefill.hold("a", first)
    tables.prefill.hold("b", later)
    assert not tables.ask(first)
    tables.prefill.end("a")
    assert tables.ask(later)


def test_a_word_that_is_not_written_yet_is_waited_for(tables):
    """P's scheduler may answer before its worker has heard of a step."""
    before, generation = generation_of(START, 4), generation_of(START, 4 + _SLOTS)
    check = tables.check(generation)
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        assert check.answer(tables.world.decode) is None
    tables.prefill.hold("an earlier one", before)
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        assert check.answer(tables.world.decode) is None
    tables.prefill.hold("a", generation)
    assert answer(check, tables.world)


def test_a_word_that_never_comes_is_that_of_a_p_that_has_started_anew(tables, monkeypatch):
    monkeypatch.setattr(check_module, "_MOST_POLLS", 20)
    assert not tables.ask(generation_of(START, 1))


def test_a_turns_word_may_come_behind_a_long_step_of_d(tables, monkeypatch):
    """D writes it with the next step, and a step may take seconds that is under way."""
    monkeypatch.setattr(check_module, "_MOST_POLLS", 3)
    generation = generation_of(START, 1)
    check = replace(tables.check(generation), is_read_back=True)
    for _ in range(50):
        assert check.answer(tables.world.decode) is None
        time.sleep(PAUSE_SECONDS)
    tables.prefill.hold("a", generation)
    assert answer(check, tables.world)


def test_a_freeze_of_any_length_fails_no_word_that_comes_behind_it(tables, monkeypatch):
    """Made up: the clock of a process that was stopped for an hour."""
    generation, clock = generation_of(START, 1), time.monotonic
    check = tables.check(generation)
    while check._asked is None or check._handle is not None:
        assert check.answer(tables.world.decode) is None
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600.0)
    assert check.answer(tables.world.decode) is None
    tables.prefill.hold("a", generation)
    assert answer(check, tables.world)


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
        for check in [tables.check(generation_of(START, 1)) for _ in range(reads)]:
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
    check, silent = tables.check(generation_of(START, 1)), Silent(tables.world.decode)
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
    generation = generation_of(START, 1)
    tables.prefill.hold("a", generation)
    silent = Silent(tables.world.decode)
    for _ in range(HoldTable.landings // 8):
        given_up = tables.check(generation)
        assert given_up.answer(silent) is None
        given_up.release(silent)
        assert tables.ask(generation)
    places = {tables.decode.take_landing() for _ in range(HoldTable.landings)}
    assert len(places) == HoldTable.landings
    assert None not in places
    assert tables.decode.take_landing() is None


class _Reads:
    """Reads of the world's request whose blocks P holds by a word, in a thread or in steps."""

    def __init__(self, tables: Tables, *, is_paced: bool) -> None:
        self.tables, self.world = tables, tables.world
        self.gate, self.pool = AgentGate(), tables.world.pool(1 << 20)
        self.thread = ProgressThread(self.pool, torch.device("cpu"), self.gate)
        self.is_paced = is_paced

    def make(self, check: HoldCheck, agent: object = None, **how: object):
        agent = agent or self.world.decode
        if not self.is_paced:
            read = self.world.read(self.pool, agent, **how)
            read.lifetime = Lifetime(checks=(check,))
            return read
        gated = ProgressAgent(agent, self.gate)
        read = self.world.read(self.pool, gated, **how)
        read.lifetime = Lifetime(checks=(check,))
        return BackgroundRead(read, self.thread)


def _lifetime(read: StagedRead | BackgroundRead) -> Lifetime:
    staged = read._read if isinstance(read, BackgroundRead) else read
    return staged.lifetime


def _verdict(read: StagedRead | BackgroundRead) -> CheckResult | None:
    return _lifetime(read).verdict


@pytest.fixture(params=[True, False], ids=["in the thread", "in steps"])
def reads(request, tables):
    made = _Reads(tables, is_paced=request.param)
    yield made
    made.thread.stop()


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_read_is_done_once_p_has_said_that_it_held_the_blocks(reads, tables, is_direct):
    generation = generation_of(START, 1)
    read = reads.make(tables.check(generation), is_direct=is_direct)
    read.start()
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        assert read.state() == "PROC", "P's worker has not heard of it"
    assert is_told_nothing(reads.world), "and is not told before it has said so"
    assert _verdict(read) is None
    tables.prefill.hold("a", generation)
    assert finish(read) == ["DONE"]
    assert reads.world.is_identical()
    assert notifications(reads.world) == [b"done"]
    assert _verdict(read) is CheckResult.HELD
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
    generation = generation_of(START, 1)
    tables.prefill.hold("a", generation)
    agent = _EndsWhenRead(reads.world.decode, lambda: tables.prefill.end("a"))
    read = reads.make(tables.check(generation), agent, is_direct=is_direct)
    told: list[object] = []
    _lifetime(read).fail_check = lambda: told.append(read)
    read.start()
    assert finish(read) == ["ERR"]
    assert "let go of a request's blocks before they had all been read" in caplog.text
    assert is_told_nothing(reads.world), "P keeps no such request"
    assert _verdict(read) is CheckResult.GONE
    assert told == [read]
    assert reads.pool.taken_bytes == 0
    read.release()


@pytest.mark.parametrize("is_held", [True, False])
def test_what_was_long_on_its_way_asks_before_anything_is_read(reads, tables, is_held):
    generation = generation_of(START, 1)
    tables.prefill.hold("a", generation)
    if not is_held:
        tables.prefill.end("a")
    before = reads.world.target.clone()
    read = reads.make(tables.check(generation, age_seconds=2.0))
    read.start()
    assert finish(read) == ["DONE" if is_held else "ERR"]
    assert _verdict(read) is (CheckResult.HELD if is_held else CheckResult.GONE)
    if is_held:
        assert reads.world.is_identical()
    else:
        assert torch.equal(reads.world.target, before)
    read.release()


class Wordless(wrapt.ObjectProxy):
    """Fake: an agent without a transport between host memories, for words alone."""

    def __init__(self, agent: object, how: str) -> None:
        super().__init__(agent)
        self._self_how, self._self_words = how, []

    def get_xfer_descs(self, descs, kind):
        made = self.__wrapped__.get_xfer_descs(descs, kind)
        if descs[0][1] == WORD_BYTES:
            self._self_words.append(made)
        return made

    def initialize_xfer(self, operation, ours, theirs, *args):
        handle = self.__wrapped__.initialize_xfer(operation, ours, theirs, *args)
        if any(theirs is one for one in self._self_words):
            if self._self_how == "cannot be prepared":
                raise nixlBackendError("no transport")
            self._self_words.append(handle)
        return handle

    def check_xfer_state(self, handle):
        state = self.__wrapped__.check_xfer_state(handle)
        return "ERR" if any(handle is one for one in self._self_words) else state

    def transfer(self, handle):
        state = self.__wrapped__.transfer(handle)
        return "ERR" if any(handle is one for one in self._self_words) else state


@pytest.mark.parametrize("how", ["cannot be prepared", "fails"])
def test_a_peer_whose_word_alone_cannot_be_read_is_asked_no_more(reads, tables, how, caplog):
    """Its loads are unproven, as those of a P without kvpatch; one is warned of."""
    generation = generation_of(START, 1)
    tables.prefill.hold("a", generation)
    peer = (reads.world.ends.agent, tables.prefill.address)
    for _ in range(MOST_MISSED):
        assert tables.decode.missed[peer] < MOST_MISSED
        reads.world.target.zero_()
        agent = Wordless(reads.world.decode, how)
        # Far from old, however busy the machine: else the word is asked for before the data.
        read = reads.make(tables.check(generation, age_seconds=-SECONDS), agent)
        read.start()
        assert finish(read) == ["DONE"]
        assert reads.world.is_identical()
        assert _verdict(read) is None
        assert notifications(reads.world) == [b"done"]
        read.release()
    assert tables.decode.missed == {peer: MOST_MISSED}
    warned = [one for one in caplog.records if "are not proven" in one.getMessage()]
    assert [one.levelname for one in warned].count("WARNING") == 1
    assert tables.ask(generation)
    assert not tables.decode.missed, "one that is heard again is asked again"
    assert len(tables.decode._free) == HoldTable.landings


@pytest.mark.parametrize("is_over", [False, True])
def test_before_anything_is_read_the_lease_decides_in_its_place(reads, tables, is_over):
    generation = generation_of(START, 1)
    tables.prefill.hold("a", generation)
    before, told = reads.world.target.clone(), []
    agent = Wordless(reads.world.decode, "fails")
    read = reads.make(tables.check(generation, age_seconds=2.0), agent)
    lifetime = _lifetime(read)
    lifetime.lease = Lease(time.monotonic() + (-1 if is_over else SECONDS))
    lifetime.fail_check = lambda: told.append(read)
    read.start()
    assert finish(read) == ["ERR" if is_over else "DONE"]
    assert _verdict(read) is (CheckResult.EXPIRED if is_over else None)
    assert told == ([read] if is_over else [])
    if is_over:
        assert torch.equal(reads.world.target, before)
    else:
        assert reads.world.is_identical()
    read.release()


def test_data_that_cannot_be_read_fails_whatever_becomes_of_the_word(reads, tables):
    """P is dead: nothing is counted against its word, and no check has failed."""
    generation, told = generation_of(START, 1), []
    agent = Failing(Wordless(reads.world.decode, "fails"), after=0)
    read = reads.make(tables.check(generation, age_seconds=2.0), agent)
    _lifetime(read).fail_check = lambda: told.append(read)
    read.start()
    assert finish(read) == ["ERR"]
    assert not told
    assert not tables.decode.missed
    read.release()


def test_a_read_that_is_given_up_does_not_wait_for_the_word(reads, tables):
    read = reads.make(tables.check(generation_of(START, 1)))
    read.start()
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        assert read.state() == "PROC"
    assert read.void()
    assert finish(read) == ["ERR"]
    assert _verdict(read) is None
    read.release()
    assert reads.pool.taken_bytes == 0
