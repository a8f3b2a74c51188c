"""What NIXL counts, where it counts nothing."""

from __future__ import annotations

from types import SimpleNamespace

from kvpatch.transfer.own_read import Tally, Telemetry, sum_of


class _Counts:
    """Fake: an agent that says this of every transfer."""

    def __init__(self, said: object) -> None:
        self.said = said

    def get_xfer_telemetry(self, handle: object) -> object:
        return self.said


def test_an_agent_that_says_nothing_is_handed_on_as_that():
    """A release takes None from 0.32 on; an error there would make a failed load of a good one."""
    tally = Tally(_Counts(None))
    tally.count("a")
    tally.count("b")
    assert tally.telemetry() is None
    assert sum_of([None, Telemetry(totalBytes=3)]).totalBytes == 3


def test_what_it_says_is_added_up():
    one = SimpleNamespace(startTime=5, postDuration=1, xferDuration=2, totalBytes=4096, descCount=1)
    tally = Tally(_Counts(one))
    tally.count("a")
    tally.count("b")
    assert tally.telemetry() == Telemetry(5, 2, 4, 8192, 2)
