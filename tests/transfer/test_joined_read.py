"""Several reads as one; each is a fake that says what the test tells it to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvpatch.transfer.own_read import JoinedRead, OwnRead, Telemetry


class nixlBind:  # noqa: N801 - where NIXL's errors are looked for, by this name
    """The fake's bindings."""

    class nixlBackendError(Exception):  # noqa: N801, N818
        """As NIXL raises it."""


@dataclass(eq=False)
class _FakeRead(OwnRead):
    """What becomes of it is set by the test."""

    name: str
    outcome: str = "PROC"
    is_startable: bool = True
    is_releasable: bool = True
    is_started: bool = False
    released: int = 0
    asked: int = 0

    def start(self) -> str:
        if not self.is_startable:
            raise nixlBind.nixlBackendError(self.name)
        self.is_started = True
        return "PROC"

    def state(self) -> str:
        self.asked += 1
        return self.outcome

    def void(self) -> bool:
        if self.outcome == "DONE":
            return False
        self.outcome = "ERR"
        return True

    def telemetry(self) -> Telemetry:
        return Telemetry(len(self.name), 1, 2, 100, 3)

    def release(self) -> None:
        self.released += 1
        if not self.is_releasable:
            raise nixlBind.nixlBackendError(self.name)


class _FakeAgent:
    """One whose errors are looked for in this module."""


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def reads() -> tuple[_FakeRead, _FakeRead]:
    return _FakeRead("a"), _FakeRead("bb")


@pytest.fixture
def read(reads: tuple[_FakeRead, _FakeRead], told: list[str]) -> JoinedRead:
    return JoinedRead(_FakeAgent(), reads, lambda: told.append("others"))


Reads = tuple[_FakeRead, _FakeRead]


def test_done_when_all_are(reads: Reads, read: JoinedRead, told: list[str]) -> None:
    first, second = reads
    assert read.start() == "PROC"
    assert first.is_started and second.is_started
    second.outcome = "DONE"
    assert (read.state(), told) == ("PROC", [])
    first.outcome = "DONE"
    assert (read.state(), told) == ("DONE", ["others"])
    assert (read.state(), told) == ("DONE", ["others"])  # once
    assert read.telemetry() == Telemetry(1, 2, 4, 200, 6)
    read.release()
    read.release()
    assert (first.released, second.released) == (1, 1)


def test_fails_when_nothing_is_written_any_more(
    reads: Reads, read: JoinedRead, told: list[str]
) -> None:
    read.start()
    reads[0].outcome = "ERR"
    assert read.state() == "PROC"
    reads[1].outcome = "DONE"
    assert read.state() == "ERR"
    assert (read.state(), told) == ("ERR", [])


def test_a_later_read_that_does_not_start(reads: Reads, read: JoinedRead) -> None:
    reads[1].is_startable = False
    assert read.start() == "PROC"
    assert read.state() == "PROC"
    reads[0].outcome = "DONE"
    assert read.state() == "ERR"
    read.release()
    assert [one.released for one in reads] == [1, 1]


def test_the_first_read_that_does_not_start(
    reads: Reads, read: JoinedRead, told: list[str]
) -> None:
    reads[0].is_startable = False
    with pytest.raises(nixlBind.nixlBackendError):
        read.start()
    assert [one.released for one in reads] == [1, 1]
    assert (read.state(), told) == ("ERR", [])


def test_all_are_let_go_of_where_one_cannot_be(reads: Reads, read: JoinedRead) -> None:
    read.start()
    reads[0].is_releasable = False
    with pytest.raises(nixlBind.nixlBackendError):
        read.release()
    assert [one.released for one in reads] == [1, 1]


def test_what_is_given_up_is_told_to_the_others_and_not_done(
    reads: Reads, read: JoinedRead, told: list[str]
) -> None:
    read.start()
    reads[0].outcome = "DONE"
    assert read.state() == "PROC"
    asked = [one.asked for one in reads]
    assert read.void()
    assert [one.asked for one in reads] == asked, "who is asked goes on, and places more"
    assert [read.state(), read.state()] == ["ERR", "ERR"]
    assert told == ["others"], "P's other ranks may free their blocks"


def test_what_is_done_is_not_given_up(reads: Reads, read: JoinedRead) -> None:
    read.start()
    for one in reads:
        one.outcome = "DONE"
    assert not read.void()
    assert read.state() == "DONE"
