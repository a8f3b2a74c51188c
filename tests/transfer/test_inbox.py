"""A wait for what is handed over ends in its time; nothing that is put is lost or waits."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import pytest

from kvpatch.transfer import progress_thread as inbox_module
from kvpatch.transfer.progress_thread import Inbox

SECONDS = 20.0
#: A wait that is over where the system takes the core away for as long.
SHORT_SECONDS = 1e-6
#: Who does not wait for ever has gone on by then, however busy the machine is.
PATIENCE_SECONDS = 4.0


@pytest.fixture
def inbox() -> Inbox[Any]:
    return Inbox()


def in_thread(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_items_come_in_order(inbox):
    for number in range(3):
        inbox.put(number)
    assert [inbox.get(0), *inbox.taken()] == [0, 1, 2]
    assert not inbox
    with pytest.raises(Empty):
        inbox.get(0)


def test_an_item_is_not_lost_to_a_ring_for_one_before_it(inbox):
    for number in range(3):
        inbox.put(number)
        assert list(inbox.taken()) == [number]
    with pytest.raises(Empty):
        inbox.get(0.01)
    inbox.put(3)
    assert inbox.get(0) == 3


def test_who_waits_is_woken(inbox):
    found: list[object] = []
    thread = in_thread(lambda: found.append(inbox.get(SECONDS)))
    time.sleep(0.05)
    came = time.monotonic()
    inbox.put("item")
    thread.join(SECONDS)
    assert found == ["item"]
    assert time.monotonic() - came < SECONDS / 2


def test_a_wait_is_as_long_as_it_was_asked_for(inbox):
    inbox.put(0)
    inbox.get(0)
    came = time.monotonic()
    with pytest.raises(Empty):
        inbox.get(0.1)
    assert 0.1 <= time.monotonic() - came < SECONDS / 2


def test_a_wait_that_is_over_before_it_begins_ends(inbox, monkeypatch):
    """The system may give the core to somebody else for a while, between any two instructions."""
    clock = itertools.count()
    monkeypatch.setattr(inbox_module, "monotonic", lambda: float(next(clock)))
    inbox.put(0)
    assert list(inbox.taken()) == [0]  # and its ring is still there
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(Empty):
            inbox.get(3e-5)
        ended.set()

    in_thread(wait)
    assert ended.wait(SECONDS)


def stands_still(
    get: Callable[[float], object], put: Callable[[int], None], seconds: float
) -> bool:
    """Whether one of many short waits, in so long, does not end in PATIENCE_SECONDS."""
    waited, is_over = [0], threading.Event()

    def wait() -> None:
        while not is_over.is_set():
            put(0)
            get(0)
            with suppress(Empty):
                get(SHORT_SECONDS)
            waited[0] += 1

    def work() -> None:
        while not is_over.is_set():
            sum(range(100))

    threads = [in_thread(wait), in_thread(work)]
    end, before, moved = time.monotonic() + seconds, 0, time.monotonic()
    while not (is_still := time.monotonic() - moved > PATIENCE_SECONDS):
        time.sleep(0.05)
        if waited[0] != before:
            before, moved = waited[0], time.monotonic()
            if moved > end:
                break
    is_over.set()
    put(0)  # who waits for ever does no longer
    for thread in threads:
        thread.join(SECONDS)
    assert waited[0]
    return is_still


def test_short_waits_end(inbox):
    assert not stands_still(inbox.get, inbox.put, seconds=2)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="its short waits end")
def test_those_of_pythons_own_queue_do_not():
    """The negative control, and why there is an inbox."""
    made: SimpleQueue[int] = SimpleQueue()

    def get(seconds: float) -> object:
        return made.get(timeout=seconds) if seconds else made.get_nowait()

    assert stands_still(get, made.put, seconds=60)


def test_what_is_collected_in_a_put_may_put(inbox):
    """Whatever instruction it is in: a lock of its own would be waited for for ever."""
    more = iter(range(1, 100))
    puts: list[int] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is Inbox.put.__code__ and event == "line":
            sys.settrace(None)
            puts.append(next(more))
            inbox.put(puts[-1])
            sys.settrace(trace)
        return trace

    def put() -> None:
        sys.settrace(trace)
        try:
            inbox.put(0)
        finally:
            sys.settrace(None)
        inbox.put(100)

    thread = in_thread(put)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert len(puts) > 1
    assert sorted(inbox.taken()) == [0, *puts, 100]


def test_nothing_is_lost_between_threads(inbox):
    count = 2_000

    def put_all(first: int) -> Callable[[], None]:
        return lambda: [inbox.put(number) for number in range(first, first + count)] and None

    threads = [in_thread(put_all(count * number)) for number in range(4)]
    found = [inbox.get(SECONDS) for _ in range(4 * count)]
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(found) == list(range(4 * count))
    assert not inbox
