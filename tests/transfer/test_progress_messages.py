"""A wait of the progress thread ends in its time; no read that it is told of is lost or waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from kvpatch.transfer.agent_gate import AgentGate
from kvpatch.transfer.progress_thread import ProgressThread

SECONDS = 20.0


class Told(ProgressThread):
    """One that only writes down what it is told of."""

    def __init__(self) -> None:
        pool: Any = None
        super().__init__(pool, torch.device("cpu"), AgentGate())
        self.found: list[Any] = []

    def _book(self, read: Any, is_wanted: bool) -> None:
        self.found.append(read)

    def tell(self, read: Any) -> None:
        self._tell(read, is_wanted=True)


@pytest.fixture
def told() -> Told:
    return Told()


def in_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("has_read", [True, False])
def test_who_waits_is_woken(told: Told, has_read: bool) -> None:
    """By a read, or a copy that is over."""
    thread = in_thread(lambda: told._take(10 * SECONDS))
    time.sleep(0.05)
    told.tell("read") if has_read else told.wake()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert told.found == ["read"] * has_read


def test_what_wakes_it_in_a_round_ends_its_wait_and_what_did_before_does_not(told: Told) -> None:
    told.tell(0)
    told.wake()
    assert told._take(0)
    told._begin_round()
    came = time.monotonic()
    assert not told._take(0.1)
    assert time.monotonic() - came >= 0.1
    told.wake()
    assert not told._take(10 * SECONDS)
    told._is_ending = True  # and the ring for it was taken for another one
    assert not told._take(10 * SECONDS)
    assert time.monotonic() - came < SECONDS


def test_what_is_collected_while_it_is_told_may_tell(told: Told) -> None:
    """Whatever instruction it is in: a lock of its own would be waited for for ever."""
    more = iter(range(1, 100))
    told_of: list[int] = []
    codes = (ProgressThread._tell.__code__, ProgressThread.wake.__code__)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code in codes and event == "line":
            sys.settrace(None)
            told_of.append(next(more))
            told.tell(told_of[-1])
            sys.settrace(trace)
        return trace

    def tell() -> None:
        sys.settrace(trace)
        try:
            told.tell(0)
        finally:
            sys.settrace(None)
        told.tell(100)

    thread = in_thread(tell)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert len(told_of) > 1
    assert told._take(0)
    assert sorted(told.found) == [0, *told_of, 100]


def test_nothing_is_lost_between_threads(told: Told) -> None:
    count = 2_000

    def tell_all(first: int) -> Callable[[], object]:
        return lambda: [told.tell(number) for number in range(first, first + count)]

    threads = [in_thread(tell_all(count * number)) for number in range(4)]
    end = time.monotonic() + SECONDS
    while len(told.found) < 4 * count and time.monotonic() < end:
        told._take(0.1)
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(told.found) == list(range(4 * count))
