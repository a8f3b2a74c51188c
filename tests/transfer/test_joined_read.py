"""Several reads as one; the agent is a fake that says what the test tells it to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from kvpatch.transfer.joined_read import JoinedRead
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.telemetry import Telemetry


class nixlBind:  # noqa: N801 - where NIXL's errors are looked for, by this name
    """The fake's bindings."""

    class nixlBackendError(Exception):  # noqa: N801, N818
        """As NIXL raises it."""


@dataclass
class _FakeAgent:
    """Transfers are names; what becomes of each is set by the test."""

    states: dict[str, str] = field(default_factory=dict)
    not_started: str = ""
    started: list[str] = field(default_factory=list)
    released: Counter[str] = field(default_factory=Counter)

    def transfer(self, read: str) -> str:
        if read == self.not_started:
            raise nixlBind.nixlBackendError(read)
        self.started.append(read)
        return "PROC"

    def check_xfer_state(self, read: str) -> str:
        state = self.states.get(read, "PROC")
        if state == "raises":
            raise nixlBind.nixlBackendError(read)
        return state

    def get_xfer_telemetry(self, read: str) -> Telemetry:
        return Telemetry(len(read), 1, 2, 100, 3)

    def release_xfer_handle(self, read: str) -> None:
        self.released[read] += 1
        if self.states.get(read) == "not released":
            raise nixlBind.nixlBackendError(read)


@pytest.fixture
def agent() -> _FakeAgent:
    return _FakeAgent()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def read(agent: _FakeAgent, told: list[str]) -> JoinedRead:
    return JoinedRead(agent, ["a", "bb"], lambda: told.append("others"))


def test_done_when_all_are(agent: _FakeAgent, read: JoinedRead, told: list[str]) -> None:
    assert read.start() == "PROC"
    assert agent.started == ["a", "bb"]
    agent.states["bb"] = "DONE"
    assert (read.state(), told) == ("PROC", [])
    agent.states["a"] = "DONE"
    assert (read.state(), told) == ("DONE", ["others"])
    assert (read.state(), told) == ("DONE", ["others"])  # once
    assert read.telemetry() == Telemetry(1, 2, 4, 200, 6)
    read.release()
    read.release()
    assert agent.released == {"a": 1, "bb": 1}


@pytest.mark.parametrize("state", ["ERR", "raises"])
def test_fails_when_nothing_is_written_any_more(
    agent: _FakeAgent, read: JoinedRead, told: list[str], state: str
) -> None:
    read.start()
    agent.states["a"] = state
    assert read.state() == "PROC"
    agent.states["bb"] = "DONE"
    assert read.state() == "ERR"
    assert (read.state(), told) == ("ERR", [])


def test_a_later_read_that_does_not_start(agent: _FakeAgent, read: JoinedRead) -> None:
    agent.not_started = "bb"
    assert read.start() == "PROC"
    assert read.state() == "PROC"
    agent.states["a"] = "DONE"
    assert read.state() == "ERR"
    read.release()
    assert agent.released == {"a": 1, "bb": 1}


def test_the_first_read_that_does_not_start(
    agent: _FakeAgent, read: JoinedRead, told: list[str]
) -> None:
    agent.not_started = "a"
    with pytest.raises(nixlBind.nixlBackendError):
        read.start()
    assert agent.released == {"a": 1, "bb": 1}
    assert (read.state(), told) == ("ERR", [])


def test_all_are_let_go_of_where_one_cannot_be(agent: _FakeAgent, read: JoinedRead) -> None:
    read.start()
    agent.states["a"] = "not released"
    with pytest.raises(nixlBind.nixlBackendError):
        read.release()
    assert agent.released == {"a": 1, "bb": 1}


class _FakeStaged(StagedRead):
    """A staged read that is on the wire until it is given up."""

    def __init__(self, is_done: bool) -> None:
        self._is_void, self._is_done = False, is_done

    def void(self) -> bool:
        self._is_void = not self._is_done
        return self._is_void

    def state(self) -> str:
        return "DONE" if self._is_done else "ERR" if self._is_void else "PROC"

    def release(self) -> None:
        pass

    def start(self) -> str:
        return "PROC"


class _StagedAgent(_FakeAgent):
    """As an engine's agent, which takes staged reads for transfers."""

    def transfer(self, read: StagedRead) -> str:
        return read.start()

    def check_xfer_state(self, read: StagedRead) -> str:
        return read.state()


def test_what_is_given_up_is_told_to_the_others_and_not_done(told: list[str]) -> None:
    reads = [_FakeStaged(is_done=True), _FakeStaged(is_done=False)]
    joined = JoinedRead(_StagedAgent(), reads, lambda: told.append("told"))
    joined.start()
    assert joined.state() == "PROC"
    assert joined.void()
    assert [joined.state(), joined.state()] == ["ERR", "ERR"]
    assert told == ["told"], "P's other ranks may free their blocks"


def test_what_is_done_or_none_of_ours_is_not_given_up(agent: _FakeAgent) -> None:
    assert not JoinedRead(agent, ["a"], lambda: None).void()
    done = JoinedRead(_StagedAgent(), [_FakeStaged(is_done=True)], lambda: None)
    done.start()
    assert not done.void()
    assert done.state() == "DONE"
