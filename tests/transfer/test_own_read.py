"""Several reads as one, each a fake that says what the test tells it to; and what NIXL counts."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvpatch.transfer.own_read import JoinedRead, OwnRead, Tally, Telemetry, sum_of


class nixlBind:  # noqa: N801 - where NIXL's errors are looked for, by this name
    """The fake's bindings."""

    class nixlBackendError(Exception):  # noqa: N801, N818
        """As NIXL raises it."""


@dataclass(eq=False)
class _FakeRead(OwnRead):
    """What becomes of it is set by the test."""

    outcome: str = "PROC"
    is_startable: bool = True
    is_releasable: bool = True
    is_started: bool = False
    released: int = 0
    asked: int = 0

    def start(self) -> str:
        if not self.is_startable:
            raise nixlBind.nixlBackendError
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
        return Telemetry(1, 1, 2, 100, 3)

    def release(self) -> None:
        self.released += 1
        if not self.is_releasable:
            raise nixlBind.nixlBackendError


class _FakeAgent:
    """One whose errors are looked for in this module."""


class _Joined(JoinedRead):
    """Two reads as one, and how often P's other ranks were told."""

    def __init__(self) -> None:
        self.first, self.second = _FakeRead(), _FakeRead()
        self.told = 0
        super().__init__(_FakeAgent(), (self.first, self.second), self._tell)

    def _tell(self) -> None:
        self.told += 1

    @property
    def released(self) -> tuple[int, int]:
        return self.first.released, self.second.released


@pytest.fixture
def read() -> _Joined:
    return _Joined()


def test_done_when_all_are(read: _Joined) -> None:
    assert read.start() == "PROC"
    assert read.first.is_started and read.second.is_started
    read.second.outcome = "DONE"
    assert (read.state(), read.told) == ("PROC", 0)
    read.first.outcome = "DONE"
    assert (read.state(), read.told) == ("DONE", 1)
    assert not read.void()
    assert (read.state(), read.told) == ("DONE", 1), "once"
    assert read.telemetry() == Telemetry(1, 2, 4, 200, 6)
    read.release()
    read.release()
    assert read.released == (1, 1)


@pytest.mark.parametrize("is_startable", [True, False])
def test_fails_when_nothing_is_written_any_more(read: _Joined, is_startable: bool) -> None:
    """Of one that fails, or a later one that does not start."""
    read.second.is_startable = is_startable
    assert read.start() == "PROC"
    read.second.outcome = "ERR"
    assert read.state() == "PROC"
    read.first.outcome = "DONE"
    assert [read.state(), read.state()] == ["ERR", "ERR"]
    read.release()
    assert (read.told, read.released) == (0, (1, 1))


def test_the_first_read_that_does_not_start(read: _Joined) -> None:
    read.first.is_startable = False
    with pytest.raises(nixlBind.nixlBackendError):
        read.start()
    assert (read.state(), read.told, read.released) == ("ERR", 0, (1, 1))


def test_all_are_let_go_of_where_one_cannot_be(read: _Joined) -> None:
    read.start()
    read.first.is_releasable = False
    with pytest.raises(nixlBind.nixlBackendError):
        read.release()
    assert read.released == (1, 1)


def test_what_is_given_up_is_told_to_the_others_and_not_done(read: _Joined) -> None:
    read.start()
    read.first.outcome = "DONE"
    assert read.state() == "PROC"
    asked = read.first.asked, read.second.asked
    assert read.void()
    assert (read.first.asked, read.second.asked) == asked, "who is asked goes on, and places more"
    assert [read.state(), read.state()] == ["ERR", "ERR"]
    assert read.told == 1, "P's other ranks may free their blocks"


@pytest.mark.parametrize(
    ("counts", "total"),
    [
        # A release takes None from 0.32 on; an error there would make a failed load of a good one.
        (None, None),
        (Telemetry(5, 1, 2, 4096, 1), Telemetry(5, 2, 4, 8192, 2)),
    ],
)
def test_what_nixl_counts_is_added_up(counts: Telemetry | None, total: Telemetry | None) -> None:
    tally = Tally(SimpleNamespace(get_xfer_telemetry=lambda handle: counts))
    tally.count("a")
    tally.count("b")
    assert tally.telemetry() == total
    assert sum_of([None, Telemetry(totalBytes=3)]).totalBytes == 3
