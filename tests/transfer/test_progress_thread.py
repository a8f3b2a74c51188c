"""Reads that go on in a thread of their own, over real NIXL; what is made to fail is labelled."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import wrapt

from kvpatch.geometry.segments import BlockList, uncovered_tail
from kvpatch.transfer import caches as caches_module
from kvpatch.transfer import progress_thread
from kvpatch.transfer import staged_read as staged_module
from kvpatch.transfer.agent_gate import STEP_CALLS, AgentGate, EngineAgent, ProgressAgent
from kvpatch.transfer.progress_thread import BackgroundRead, ProgressThread

from .staged_world import (
    SECONDS,
    TOKENS,
    Engine,
    Held,
    World,
    finish,
    is_told_nothing,
    notifications,
    taken,
    threads_of_ours,
    wait_until,
    waits_for,
)

pytestmark = pytest.mark.lab


@pytest.fixture(params=["copies by turns", "copies beside"])
def make(world: World, request: pytest.FixtureRequest) -> Iterator[Callable[[int], Engine]]:
    made: list[Engine] = []

    def engine(pool_bytes: int) -> Engine:
        made.append(Engine(world, pool_bytes, is_beside=request.param == "copies beside"))
        return made[-1]

    yield engine
    for one in made:
        one.stop()


@pytest.mark.parametrize("pool_bytes", [1 << 20, 3 * 4096, 4096])
def test_a_read_goes_on_while_nobody_looks(world, make, pool_bytes):
    engine = make(pool_bytes)
    read = engine.read()
    assert not world.is_identical(), "negative control"
    assert not engine.thread.is_running, "nothing has been read yet"
    assert read.start() == "PROC"
    wait_until(lambda: notifications(world) == [b"done"])
    assert world.is_identical()
    assert finish(read) == ["DONE"], "P may hear of it first"
    assert engine.pool.taken_bytes == 0
    assert read.telemetry().totalBytes >= TOKENS * 2 * 2 * 16 * 2 * 3
    read.release()
    read.release()
    assert read.state() == "DONE", "an old release asks again after it has let go"
    assert is_told_nothing(world)


@pytest.mark.parametrize("has_threads", [True, False])
def test_posts_are_large_only_where_somebody_shares_them(world, make, monkeypatch, has_threads):
    """Somebody does where NIXL has not read a post before it returns."""
    engine, posts, transfer = make(4096), [], world.decode.transfer
    monkeypatch.setattr(staged_module, "_MOST_DIRECT_BYTES", 512)
    monkeypatch.setattr(staged_module, "SPREAD_RUNS", 16)

    def counted(handle: Any) -> str:
        posts.append(handle)
        state = transfer(handle)
        return "PROC" if has_threads else state

    monkeypatch.setattr(world.decode, "transfer", counted)
    read = engine.read(is_direct=True)
    read.start()
    assert finish(read) == ["DONE"]
    assert world.is_identical()
    expected = read.telemetry().descCount / (16 if has_threads else 8)
    assert 0.9 < len(posts) / expected < 1.2
    assert engine.pool.has_threads == has_threads


def test_many_reads_share_a_pool_of_one_block_in_order(world, make, monkeypatch):
    engine = make(4096)
    asked: list[Any] = []
    take = engine.pool.take
    monkeypatch.setattr(engine.pool, "take", lambda *of: asked.append(of[0]) or take(*of))
    reads = [engine.read() for _ in range(16)]
    for read in reads:
        read.start()
    assert finish(*reads) == ["DONE"] * 16
    assert world.is_identical()
    assert engine.pool.taken_bytes == 0
    first = [turn.reader for turn in dict.fromkeys(asked)]
    assert first == [id(read._read) for read in reads], "in the order of asking"


def test_reads_in_line_are_not_asked_again(world, make, monkeypatch):
    engine = make(4096)
    held = taken(engine.pool)
    reads = [engine.read() for _ in range(40)]
    for read in reads:
        read.start()
    wait_until(lambda: len(engine.thread._reads) - len(engine.thread._going) == 39)
    assert [read.state() for read in reads] == ["PROC"] * 40
    with engine.thread.paused():
        engine.pool.give(held)
    assert finish(*reads) == ["DONE"] * 40
    assert world.is_identical()


class FirstHeld(Held):
    """Holds up the first placement that is copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.real = caches_module.place_in_host_memory
        monkeypatch.setattr(caches_module, "place_in_host_memory", self._copy)

    def _copy(self, *arguments: Any) -> None:
        if not self.is_in.is_set():
            self()
        self.real(*arguments)


@pytest.mark.parametrize("end", ["void", "release"])
@pytest.mark.parametrize("pool_bytes", [4096, 8 * 4096])
def test_giving_up_waits_for_the_copy_that_is_under_way_and_for_no_more(
    world, make, end, pool_bytes, monkeypatch
):
    """The blocks may be another request's when it returns; other chunks' copies may be queued."""
    held = FirstHeld(monkeypatch)
    engine = make(pool_bytes)
    read = engine.read()
    read.start()
    assert held.is_in.wait(SECONDS)
    if engine.copying is not None and pool_bytes > 4096:
        wait_until(lambda: engine.copying._executor._work_queue.qsize() > 0)
    waits_for(getattr(read, end), held)
    after = world.target.clone()
    if end == "void":
        assert finish(read) == ["ERR"], "what was not placed is not received"
        assert notifications(world) == [b"done"], "P may free its blocks"
    time.sleep(0.1)
    if engine.copying is not None:
        engine.copying.settle()
    assert torch.equal(world.target, after)
    assert not world.is_identical(), "negative control: the rest was not placed"
    read.release()
    other = engine.read()
    other.start()
    assert finish(other) == ["DONE"], "the pool serves the next request"
    assert world.is_identical()
    assert not other.void(), "it is done, and its blocks hold what they should"
    assert other.state() == "DONE"


@pytest.mark.parametrize("end", [None, "void", "release"])
@pytest.mark.parametrize("is_direct", [False, True])
def test_what_is_behind_the_last_token_is_zeroed_unless_the_read_is_given_up(
    world, make, end, is_direct
):
    """With what else a read does, and not by the engine's step: the blocks may be another's."""
    engine, before = make(4096), world.target.clone()
    assert not world.is_zeroed(), "negative control"
    read = engine.read(is_direct=is_direct)
    read._read.tails = world.tails
    with engine.thread.paused():
        read.start()
        assert torch.equal(world.target, before), "the step does none of it"
        if end is not None:
            getattr(read, end)()
    if end is None:
        assert finish(read) == ["DONE"]
        assert world.is_identical()
        assert world.is_zeroed()
    else:
        assert finish(read) == ["ERR"]
        time.sleep(0.05)
        assert torch.equal(world.target, before)


def test_a_read_fails_whose_tail_is_nowhere(world, make, caplog):
    engine, before = make(4096), world.target.clone()
    read = engine.read()
    ((planes, _),) = world.tails()
    beyond = uncovered_tail(BlockList(np.array([planes[0].counts.blocks]), 48), 5)
    read._read.tails = lambda: [(planes, beyond)]
    read.start()
    assert finish(read) == ["ERR"]
    assert "expected to zero" in caplog.text
    assert torch.equal(world.target, before)
    assert engine.pool.taken_bytes == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_the_thread_has_failed_the_steps_go_on(world, make, monkeypatch, caplog):
    """A mistake of ours, made up: an error that no read can raise."""
    engine = make(4096)
    reads = [engine.read() for _ in range(3)]
    monkeypatch.setattr(ProgressThread, "_move", lambda thread: 1 / 0)
    for read in reads:
        read.start()
    wait_until(lambda: not engine.thread.is_running)
    assert not world.is_identical(), "negative control"
    assert finish(*reads) == ["DONE"] * 3
    assert world.is_identical()
    assert engine.pool.taken_bytes == 0
    assert "the engine's steps take over" in caplog.text


def test_a_stopped_thread_leaves_reads_to_the_steps(world, make):
    engine = make(4096)
    reads = [engine.read() for _ in range(8)]
    for read in reads[:4]:
        read.start()
    engine.thread.stop()
    assert not threads_of_ours()
    dropped = reads.pop(0)
    del dropped
    gc.collect()
    for read in reads[3:]:
        read.start()
    assert finish(*reads) == ["DONE"] * 7
    assert world.is_identical()
    assert engine.pool.taken_bytes == 0


def test_an_engine_that_sleeps_and_wakes_up_reads_in_the_thread_again(world, make):
    engine = make(4096)
    first, later = engine.read(), engine.read()
    first.start()
    engine.thread.rest()
    assert not engine.thread.is_running
    assert not threads_of_ours()
    before = world.target.clone()
    time.sleep(0.05)
    assert torch.equal(world.target, before), "nothing is placed while it rests"
    later.start()
    assert engine.thread.is_running
    wait_until(lambda: len(notifications(world)) > 0)
    assert finish(first, later) == ["DONE"] * 2
    assert world.is_identical()
    assert engine.pool.taken_bytes == 0


@pytest.mark.parametrize("is_direct", [False, True])
def test_one_that_is_let_go_of_half_way_tells_nobody(world, make, is_direct):
    """P would let go of blocks that are still being read."""
    engine = make(4096)
    reads = [engine.read(is_direct=is_direct) for _ in range(4)]
    others = [engine.read() for _ in range(2)]
    with engine.thread.paused():
        for read in (*reads, *others):
            read.start()
    for read in reads:
        read.release()
    is_over = [read.state() for read in reads]
    assert finish(*others) == ["DONE"] * 2
    assert is_over.count("ERR") > 0, "negative control: some were let go of half way"
    time.sleep(0.05)
    told: list[bytes] = []
    while len(told) < 2 + is_over.count("DONE") and (more := notifications(world)):
        told += more
    assert is_told_nothing(world)
    assert len(told) == 2 + is_over.count("DONE")


def test_a_read_that_the_thread_has_lost_sight_of_goes_on(world, make):
    """Made up: whatever it waits for, it is looked at again."""
    engine = make(4096)
    held = taken(engine.pool)
    read = engine.read()
    read.start()
    wait_until(lambda: read._read._turn is not None)  # nobody calls it any more
    with engine.thread.paused():
        wait_until(lambda: bool(engine.thread._going))
        lost = dict(engine.thread._going)
        engine.thread._going.clear()
        engine.pool.give(held)
    time.sleep(0.1)
    assert lost
    assert read.state() == "PROC", "negative control: nobody takes care of it"
    assert finish(read) == ["DONE"]
    assert world.is_identical()


class _Interrupted(Exception):
    """Stands in for what a signal's handler raises."""


def test_a_wait_that_a_signal_ends_is_over(world, make, monkeypatch):
    engine = make(4096)

    class _Lock:
        """Fake: a lock that another thread holds, and a signal while it is waited for."""

        def acquire(self, *, blocking: bool = True) -> bool:
            if blocking:
                raise _Interrupted
            return False

    side = engine.gate.side_of("check_xfer_state")
    monkeypatch.setattr(side, "_lock", _Lock())
    monkeypatch.setattr(engine.thread._work, "_lock", _Lock())
    with pytest.raises(_Interrupted):
        side.call(len, "")
    with pytest.raises(_Interrupted), engine.thread.paused():
        pass
    assert not side._waiting
    assert not engine.thread._work._waiting


def test_it_ends_when_there_is_nothing_to_read_and_starts_again(make, monkeypatch):
    monkeypatch.setattr(progress_thread, "_IDLE_SECONDS", 0.05)
    engine = make(4096)
    for _ in range(3):
        engine.load()
        wait_until(lambda: not engine.thread.is_running)


def test_reads_and_aborts_of_many_requests_in_any_order(world, make):
    """None is wrong, none writes after it was given up, and no space of the pool is lost."""
    engine = make(3 * 4096)
    chosen = np.random.default_rng(7)
    noise = torch.from_numpy(chosen.integers(0, 256, world.target.numel(), dtype=np.uint8))

    def fresh() -> torch.Tensor:
        made = noise.clone()
        world.kept.append(made)
        world.decode.register_memory([(made.data_ptr(), made.numel(), 0, "")], "DRAM")
        return made

    fates = ["read", "void", "release", "drop", "read"] * 6
    seen = dict.fromkeys(fates, 0)
    going: list[tuple[BackgroundRead, torch.Tensor, str, int]] = []
    steps = 0

    def end(read: BackgroundRead, fate: str) -> None:
        seen[fate] += 1
        if fate != "drop":
            getattr(read, fate)()

    while fates or going:
        while fates and len(going) < 8:
            into = fresh()
            read = engine.read(into=into, is_direct=bool(chosen.integers(2)))
            fate = fates.pop()
            with engine.thread.paused():
                read.start()
                if fate != "read" and len(fates) % 2:  # before anything of it was read
                    end(read, fate)
                    continue
            going.append((read, into, fate, steps + int(chosen.integers(8))))
        left = []
        for read, into, fate, when in going:
            if read.state() == "DONE":
                assert world.is_identical(into)
                seen["read"] += 1
            elif fate == "read" or steps < when:
                left.append((read, into, fate, when))
            else:
                end(read, fate)
                if fate != "drop":
                    written = into.clone()
                    time.sleep(1e-3)
                    assert torch.equal(into, written), f"written to after its {fate}"
        going = left
        del read
        steps += 1
        time.sleep(1e-3)
    assert sum(seen.values()) == 30
    assert min(seen.values()) > 0, seen
    wait_until(lambda: engine.pool.taken_bytes == 0)
    assert engine.pool.lost_bytes == 0


class _Watched:
    """Fake: an agent that knows who is in it, whatever it is called for."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.seen: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    def _call(self, who: str) -> None:
        with self._lock:
            self.inside.append(who)
            self.seen.add(tuple(sorted(self.inside)))
        time.sleep(2e-4)
        with self._lock:
            self.inside.remove(who)

    check_xfer_state = send_notif = add_remote_agent = _call
    register_memory = remove_remote_agent = _call


def test_the_thread_is_in_the_agent_where_stocks_step_is_and_alone_where_it_is_not():
    """Beside a handshake with the calls of a step, and never beside the engine's own step."""
    agent, gate = _Watched(), AgentGate()
    engine, progress = EngineAgent(agent, gate), ProgressAgent(agent, gate)
    assert "add_remote_agent" not in STEP_CALLS
    assert "register_memory" not in STEP_CALLS
    began = time.monotonic()
    counts = dict.fromkeys(("step", "handshake", "thread", "registers", "removes"), 0)

    def is_over() -> bool:
        """After a second, or as many as a busy machine needs."""
        passed = time.monotonic() - began
        return passed > SECONDS or (passed > 1.0 and min(counts.values()) > 10)

    def loop(who: str, *calls: Callable[[str], None]) -> None:
        while not is_over():
            for call in calls:
                call(who)
                counts[who] += 1

    loops = [
        threading.Thread(target=loop, args=args)
        for args in (
            ("step", engine.check_xfer_state, engine.send_notif),
            ("handshake", engine.add_remote_agent),
            ("thread", progress.check_xfer_state),
            ("registers", progress.register_memory),
            ("removes", engine.remove_remote_agent, lambda _: time.sleep(0.02)),
        )
    ]
    for one in loops:
        one.start()
    for one in loops:
        one.join()
    beside = {("handshake", "step"), ("handshake", "thread")}
    alone = {(who,) for who in counts}
    assert agent.seen <= alone | beside
    assert beside <= agent.seen, "these share it, as without kvpatch"
    assert min(counts.values()) > 10, f"nobody is kept out: {counts}"


def test_a_handshake_that_waits_for_the_thread_does_not_stop_it():
    """It is kept out for a whole round, in which the thread makes several calls."""
    agent, gate = _Watched(), AgentGate()
    engine, progress = EngineAgent(agent, gate), ProgressAgent(agent, gate)
    handshake = threading.Thread(target=engine.add_remote_agent, args=("handshake",))

    def read() -> None:
        with gate.without_handshakes() as is_free:
            assert is_free
            handshake.start()
            wait_until(lambda: bool(gate.side_of("add_remote_agent")._waiting))
            progress.register_memory("thread")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    handshake.join(SECONDS)
    assert agent.seen == {("thread",), ("handshake",)}
    found = []

    def ask() -> None:
        with gate.without_handshakes() as is_free:
            found.append(is_free)

    with gate.side_of("add_remote_agent").alone():
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(SECONDS)
        assert found == [False], "a handshake is not waited for"
    ask()
    assert found == [False, True]


class _Shaking(wrapt.ObjectProxy):
    """A real agent whose calls for a handshake take until they are told to end."""

    def __init__(self, agent: Any) -> None:
        super().__init__(agent)
        self._self_in, self._self_may_go = threading.Event(), threading.Event()

    def _shake(self, *_: Any) -> None:
        self._self_in.set()
        assert self._self_may_go.wait(SECONDS)

    add_remote_agent = prep_xfer_dlist = _shake


@contextmanager
def _handshake(engine: Engine, name: str) -> Iterator[threading.Thread]:
    """While inside, a handshake's call is inside NIXL."""
    agent = _Shaking(engine.world.decode)
    call = getattr(EngineAgent(agent, engine.gate), name)
    inside = threading.Thread(target=call, args=("a new P",))
    inside.start()
    assert agent._self_in.wait(SECONDS)
    try:
        yield inside
    finally:
        agent._self_may_go.set()
        inside.join()


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("name", ["add_remote_agent", "prep_xfer_dlist"])
def test_no_read_waits_for_a_handshake_that_is_inside_nixl(world, make, name, is_direct):
    engine = make(1 << 20)
    engine.load()  # has the pool made, whose memory is registered
    with _handshake(engine, name) as inside:
        world.target.zero_()
        read = engine.read(is_direct=is_direct)
        read.start()
        assert finish(read) == ["DONE"]
        assert inside.is_alive()
    assert world.is_identical()


def test_memory_is_registered_behind_it_and_no_step_waits_for_that(world, make):
    engine = make(1 << 20)
    read, other = engine.read(), engine.read()
    with _handshake(engine, "add_remote_agent") as inside:
        read.start()
        other.start()
        time.sleep(0.05)
        assert read.state() == "PROC"
        assert other.void(), "which pauses the thread"
        assert inside.is_alive()
    assert finish(read, other) == ["DONE", "ERR"]
    assert world.is_identical()


def test_an_agents_own_thread_may_enter_again():
    """What is collected inside may let go of a transfer."""
    gate = AgentGate()

    class _Again:
        def check_xfer_state(self, depth: int) -> int:
            return ProgressAgent(self, gate).send_notif(depth)

        def send_notif(self, depth: int) -> int:
            return depth if not depth else EngineAgent(self, gate).check_xfer_state(depth - 1)

    assert EngineAgent(_Again(), gate).check_xfer_state(2) == 0


def test_a_step_does_not_wait_for_messages_or_states():
    """It hears later what the thread has heard for it: all of it, once, in order."""

    class _Busy:
        """Fake: an agent with messages, one of whose calls takes until it is told to end."""

        def __init__(self) -> None:
            self.is_in, self.may_go = threading.Event(), threading.Event()
            self.waiting = {"P": [b"1", b"2"]}

        def transfer(self, handle: Any) -> str:
            self.is_in.set()
            assert self.may_go.wait(SECONDS)
            return "PROC"

        def get_new_notifs(self) -> dict[str, list[bytes]]:
            found, self.waiting = self.waiting, {}
            return found

        def check_xfer_state(self, handle: Any) -> str:
            return "DONE"

    agent, gate = _Busy(), AgentGate()
    engine, progress = EngineAgent(agent, gate), ProgressAgent(agent, gate)
    posting = threading.Thread(target=progress.transfer, args=(1,))
    posting.start()
    assert agent.is_in.wait(SECONDS)
    assert engine.get_new_notifs() == {}
    assert [engine.check_xfer_state(1) for _ in range(16)] == ["PROC"] * 16
    agent.may_go.set()
    assert engine.check_xfer_state(1) == "DONE", "not for ever"
    posting.join(SECONDS)
    agent.waiting = {"P": [b"3"], "Q": [b"4"]}
    assert engine.get_new_notifs() == {"P": [b"1", b"2", b"3"], "Q": [b"4"]}
    assert engine.get_new_notifs() == {}
    assert engine.check_xfer_state(1) == "DONE"
