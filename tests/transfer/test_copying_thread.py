"""Copies on a thread of their own; what is held up, fails or is missing is made up and says so."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from kvpatch.transfer import caches as caches_module
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.copying_thread import CopyingThread
from kvpatch.transfer.cores import cores_of_all_threads

from .staged_world import (
    SECONDS,
    Engine,
    Held,
    World,
    finish,
    is_told_nothing,
    threads_of_ours,
    wait_until,
    waits_for,
)
from .test_progress_thread import FirstHeld

pytestmark = pytest.mark.lab

#: Several chunks of the world's request.
POOL_BYTES = 8 * 4096


@pytest.fixture
def thread() -> Iterator[CopyingThread]:
    made = CopyingThread(wake=lambda: None)
    yield made
    made.stop()
    assert not threads_of_ours("kvpatch-copies")


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    made = Engine(world, POOL_BYTES, is_beside=True)
    yield made
    made.stop()


def begun(thread: CopyingThread) -> tuple[Held, Any]:
    """A copy that is under way."""
    held = Held()
    copy = thread.copy(held)
    assert held.is_in.wait(SECONDS)
    return held, copy


def test_copies_are_made_one_by_one_in_the_order_of_asking(thread):
    seen: list[int] = []
    inside = threading.Lock()

    def copy(number: int) -> None:
        assert inside.acquire(blocking=False), "one by one"
        time.sleep(1e-4)
        seen.append(number)
        inside.release()

    assert not threads_of_ours("kvpatch-copies"), "nothing has been copied yet"
    copies = [thread.copy(partial(copy, number)) for number in range(50)]
    assert threads_of_ours("kvpatch-copies")
    assert not copies[-1](), "negative control: somebody else makes them"
    wait_until(copies[-1])
    assert seen == list(range(50))
    assert all(copy() for copy in copies)


def test_an_error_is_the_copys_own_and_the_thread_goes_on(thread):
    def fails() -> None:
        raise MemoryError("no memory")

    held, _ = begun(thread)
    failed, other = thread.copy(fails), thread.copy(lambda: None)
    assert not failed()
    held.may_go.set()
    wait_until(other)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            failed()


@pytest.mark.parametrize("end", ["settle", "stop"])
def test_no_copy_is_under_way_when_it_returns(thread, end):
    made: list[int] = []
    held, _ = begun(thread)
    queued = [thread.copy(partial(made.append, number)) for number in range(5)]
    waits_for(getattr(thread, end), held)
    assert made == list(range(5)), "those that were queued too"
    assert all(copy() for copy in queued)
    assert not threads_of_ours("kvpatch-copies")
    after = thread.copy(partial(made.append, 5))
    assert bool(threads_of_ours("kvpatch-copies")) == (end != "stop")
    wait_until(after)
    assert made[5:] == [5]


def test_an_error_that_no_copy_raises_is_one_that_reads_know(thread):
    """A mistake of ours, made up."""
    broken, other = thread.copy(lambda: [][1 / 0]), thread.copy(lambda: None)
    wait_until(other)
    with pytest.raises(RuntimeError, match="what no copy raises"):
        broken()


def test_one_that_is_given_up_before_it_begins_is_left_undone(thread):
    made: list[int] = []
    held, under_way = begun(thread)
    given_up, other = (thread.copy(partial(made.append, number)) for number in range(2))
    given_up.give_up()
    assert given_up(), "its space is free"
    waits_for(under_way.give_up, held)
    assert under_way()
    wait_until(other)
    assert made == [1], "negative control: the other one was made"
    other.give_up()
    assert other()


def test_one_that_is_given_up_by_its_own_thread_is_not_waited_for(thread):
    """What is collected there may let go of a read whose copy it makes."""
    copies: list[Any] = []
    is_set = threading.Event()

    def lets_go() -> None:
        assert is_set.wait(SECONDS)
        copies[0].give_up()
        thread.settle()
        thread.stop()

    copies.append(thread.copy(lets_go))
    is_set.set()
    wait_until(copies[0])


def test_where_no_thread_can_start_copies_are_made_at_once(thread, monkeypatch, caplog):
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    made: list[int] = []
    for number in range(2):
        assert thread.copy(partial(made.append, number))()
    assert made == [0, 1]
    assert caplog.text.count("cannot start") == 1


@pytest.mark.parametrize("end", ["void", "release"])
def test_negative_control_a_queued_copy_that_is_not_given_up_writes(
    world, engine, end, monkeypatch
):
    """What test_giving_up_waits_for_the_copy_that_is_under_way sees: a mistake of ours, made up."""
    monkeypatch.setattr(Caches, "give_up", lambda caches, copies: None)
    held = FirstHeld(monkeypatch)
    read = engine.read()
    read.start()
    assert held.is_in.wait(SECONDS)
    wait_until(lambda: engine.copying._executor._work_queue.qsize() > 0)
    getattr(read, end)()
    before = world.target.clone()
    held.may_go.set()
    wait_until(lambda: not torch.equal(world.target, before))


def test_a_read_is_done_when_its_last_copy_is(world, engine, monkeypatch):
    held = FirstHeld(monkeypatch)
    read = engine.read()
    read.start()
    assert held.is_in.wait(SECONDS)
    time.sleep(0.05)
    assert read.state() == "PROC"
    assert is_told_nothing(world), "P is not told of it yet"
    held.may_go.set()
    assert finish(read) == ["DONE"]
    assert world.is_identical()
    assert engine.pool.taken_bytes == 0


def test_the_error_of_a_copy_is_its_reads(world, engine, monkeypatch, caplog):
    real, calls = caches_module.place_in_host_memory, []

    def fails_once(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("made up")
        real(*arguments)

    monkeypatch.setattr(caches_module, "place_in_host_memory", fails_once)
    read = engine.read()
    read.start()
    assert finish(read) == ["ERR"]
    assert "made up" in caplog.text
    assert is_told_nothing(world), "P is not told that it was read"
    wait_until(lambda: engine.pool.taken_bytes == 0)
    engine.load()


def test_a_read_whose_copies_fail_is_collected_at_once(engine, monkeypatch):
    """Its space is given back when it is: no error may hold what it was raised in.

    Fake: a device that says so when it is asked for a copy.
    """

    def fails() -> bool:
        raise ValueError("made up")

    monkeypatch.setattr(Caches, "place", lambda *_: fails)
    read = engine.staged()
    gone = weakref.ref(read)
    gc.disable()
    logging.disable()  # pytest keeps what is logged
    try:
        read.start()
        assert finish(read) == ["ERR"]
        assert engine.pool.taken_bytes == 0
        del read
        assert gone() is None
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()


def test_the_worker_has_one_where_it_may_use_two_cores(world, monkeypatch):
    assert len(cores_of_all_threads()) == len(os.sched_getaffinity(0)), "nobody is bound here"
    engine = Engine(world, POOL_BYTES, is_beside=False)
    cores = {"two": {0, 1}, "one": {0}}
    found = {}
    for name, these in cores.items():
        monkeypatch.setattr("kvpatch.transfer.progress_thread.cores_of_all_threads", these.copy)
        again = type(engine.thread)(engine.pool, torch.device("cpu"), engine.gate)
        found[name] = again.copying is not None
    assert found == {"two": True, "one": False}
    meta = type(engine.thread)(engine.pool, torch.device("meta"), engine.gate)
    assert meta.copying is None
