"""What reads take on this machine, measured with a real agent; what is made to fail is labelled."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import wrapt

from kvpatch.transfer import cost_probe, lost_transfers
from kvpatch.transfer.agent_gate import ProgressAgent
from kvpatch.transfer.cost_probe import CostProbe
from kvpatch.transfer.nixl import errors_of
from kvpatch.transfer.staging_pool import StagingPool

from .staged_world import DRAM, World, finish
from .test_progress_thread import Engine, make, wait_until

__all__ = ["make"]
pytestmark = pytest.mark.lab

POOL_BYTES = 1 << 20
NOT_MEASURED = "could not be measured"


class _Watched(wrapt.ObjectProxy):
    """A real agent that counts its calls; one of them may be made to fail."""

    def __init__(self, agent: Any, fail: str = "", how: Any = None) -> None:
        super().__init__(agent)
        self._self_calls: Counter[str] = Counter()
        self._self_fail, self._self_how = fail, how

    @property
    def calls(self) -> Counter[str]:
        return self._self_calls

    def mend(self) -> None:
        self._self_fail = ""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__wrapped__, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._self_calls[name] += 1
            if name == self._self_fail:
                return self._self_how(*args, **kwargs)
            return found(*args, **kwargs)

        return call


_LIMIT_SECONDS = cost_probe._LONGEST_SECONDS


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that does something else for a moment makes no read one that takes too long."""
    monkeypatch.setattr(cost_probe, "_LONGEST_SECONDS", 60.0)


@pytest.fixture
def limit(_no_limit: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is so of a process that is no test."""
    monkeypatch.setattr(cost_probe, "_LONGEST_SECONDS", _LIMIT_SECONDS)


def probe_of(world: World, agent: Any = None) -> tuple[CostProbe, StagingPool]:
    """A probe, and the worker's pool that it goes beside."""
    nixl = world.decode if agent is None else agent

    def register(size: int) -> torch.Tensor:
        buffer = torch.zeros(size, dtype=torch.uint8)
        nixl.register_memory([(buffer.data_ptr(), size, 0, "")], "DRAM")
        return buffer

    pool = StagingPool(POOL_BYTES, register)
    return CostProbe(nixl, pool, DRAM), pool


def run(probe: CostProbe) -> int:
    """Goes through all pieces."""
    return sum(1 for _ in probe.pieces())


def test_costs_of_this_machine(world: World, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "kvpatch.staging")
    agent = _Watched(world.decode)
    probe, pool = probe_of(world, agent)
    source, target = world.source.clone(), world.target.clone()
    assert probe.costs is None
    assert run(probe) > 9
    costs = probe.costs
    assert costs is not None
    assert 1e-9 <= costs.run_seconds < 1e-3
    assert 1e7 < costs.copy_bytes_per_second < 1e12
    assert 1e7 < costs.wire_bytes_per_second == costs.chunk_bytes_per_second < 1e12
    assert torch.equal(world.source, source)
    assert torch.equal(world.target, target)
    assert pool.taken_bytes == pool.lost_bytes == 0
    assert pool._buffer is None, "the pool is made by the first read that needs it"
    assert agent.calls["register_memory"] == 1
    assert agent.calls["transfer"] == agent.calls["release_xfer_handle"] == 6
    assert [record.message[:13] for record in caplog.records] == ["measured here"]


def test_what_it_reads_and_places_is_its_own_memory(world: World):
    probe, _ = probe_of(world)
    pieces = probe.pieces()
    next(pieces)
    whole = probe._own._buffer
    assert whole is not None
    half = whole.numel() // 2
    for _ in range(8):  # touched
        next(pieces)
    whole[:half] = torch.randint(1, 256, (half,), dtype=torch.uint8)
    first = whole[:half].clone()
    before = whole[half:].clone()
    next(pieces)  # short runs
    assert not torch.equal(whole[half:], before)
    next(pieces)  # long ones
    assert torch.equal(whole[half:].sort().values, first.sort().values), "all of it was read"
    for _ in pieces:
        pass
    assert torch.equal(whole[half:].sort().values, first.sort().values), "and then placed"
    assert torch.equal(whole[:half], first)


@pytest.mark.parametrize("step", range(14))
def test_each_step_leaves_nothing_on_the_wire(world: World, step: int):
    """The thread may end after any: the engine sleeps, or stops."""
    agent = _Watched(world.decode)
    pieces = probe_of(world, agent)[0].pieces()
    for _ in range(step):
        next(pieces)
        assert agent.calls["transfer"] == agent.calls["release_xfer_handle"]
    pieces.close()
    assert agent.calls["transfer"] == agent.calls["release_xfer_handle"]


def _nixl_error(world: World) -> type[Exception]:
    return next(e for e in errors_of(world.decode) if e.__name__ == "nixlBackendError")


def _raising(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    "call",
    [
        "register_memory",
        "get_xfer_descs",
        "initialize_xfer",
        "transfer",
        "check_xfer_state",
        "release_xfer_handle",
    ],
)
def test_whatever_nixl_refuses_leaves_the_constants(world: World, call: str, caplog):
    caplog.set_level(logging.DEBUG, "kvpatch.staging")
    agent = _Watched(world.decode, call, _raising(_nixl_error(world)("made to fail")))
    if call == "check_xfer_state":
        agent = _Pending(agent)
    probe, pool = probe_of(world, agent)
    run(probe)
    assert probe.costs is None
    told = [record for record in caplog.records if NOT_MEASURED in record.message]
    assert [record.levelno for record in told] == [logging.DEBUG]
    assert all(record.levelno <= logging.INFO for record in caplog.records)
    assert pool.taken_bytes == 0
    run(probe_of(world)[0])


class _Pending(wrapt.ObjectProxy):
    """A real agent whose transfers are never over when they have been started."""

    def transfer(self, handle: Any) -> str:
        self.__wrapped__.transfer(handle)
        return "PROC"


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("state", ["PROC", "ERR"])
def test_what_may_still_be_written_is_never_used_again(world: World, state, monkeypatch):
    monkeypatch.setattr(lost_transfers, "_QUARANTINE_SECONDS", 3.0)
    monkeypatch.setattr(cost_probe, "_LOOKED_AFTER_SECONDS", 0.1)
    agent = _Watched(world.decode, "check_xfer_state", lambda _: state)
    probe, _ = probe_of(world, _Pending(agent))
    came = time.monotonic()
    run(probe)
    assert time.monotonic() - came < 60
    assert probe.costs is None
    own = probe._own
    assert own.lost_bytes == own.taken_bytes == own.size_bytes
    own.recover()
    assert agent.calls["release_xfer_handle"] == 0
    assert own.lost_bytes == own.size_bytes
    agent.mend()  # it is over in the end, or was long ago
    wait_until(lambda: own.recover() or own.lost_bytes == 0)
    assert agent.calls["release_xfer_handle"] == 1


@pytest.mark.usefixtures("limit")
def test_a_read_that_is_late_is_let_go_of(world: World):
    """On a busy machine: nothing is measured, and nothing is kept, either."""
    agent = _Watched(world.decode, "check_xfer_state", lambda _: "PROC")
    probe, _ = probe_of(world, _Pending(agent))
    pieces = probe.pieces()
    while not probe._own.lost_bytes:
        next(pieces)
    assert agent.calls["release_xfer_handle"] == 0
    agent.mend()

    for _ in pieces:
        pass

    assert probe.costs is None
    assert probe._own.lost_bytes == probe._own.taken_bytes == 0
    assert agent.calls["release_xfer_handle"] == 1


@pytest.mark.usefixtures("limit")
def test_a_transfer_that_takes_too_long_is_given_up_in_time(world: World, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(cost_probe.time, "sleep", lambda seconds: waited.append(seconds))
    clock = iter(x * 1e-3 for x in range(10_000))
    monkeypatch.setattr(cost_probe.time, "monotonic", lambda: next(clock))
    agent = _Watched(world.decode, "check_xfer_state", lambda _: "PROC")
    probe, _ = probe_of(world, _Pending(agent))
    run(probe)
    assert probe.costs is None
    assert len(waited) <= 20, "milliseconds"


class _Nameless(wrapt.ObjectProxy):
    """A real agent of a NIXL that does not tell its name."""

    name = None


def test_an_agent_without_a_name(world: World, caplog):
    caplog.set_level(logging.DEBUG, "kvpatch.staging")
    probe, _ = probe_of(world, _Nameless(world.decode))
    assert run(probe) == 0
    assert probe.costs is None
    assert NOT_MEASURED in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_where_there_is_no_memory(world: World, error, caplog):
    caplog.set_level(logging.DEBUG, "kvpatch.staging")
    probe = CostProbe(world.decode, StagingPool(POOL_BYTES, _raising(error("none left"))), DRAM)
    assert run(probe) == 0
    assert probe.costs is None
    assert NOT_MEASURED in caplog.text


def aside(engine: Engine, world: World) -> CostProbe:
    """A probe that the engine's thread goes through when it has nothing to read."""
    nixl = ProgressAgent(world.decode, engine.gate)
    probe = CostProbe(nixl, engine.pool, DRAM)
    engine.thread.do_aside(probe.pieces())
    return probe


def test_the_thread_measures_when_it_has_read(world: World, make):
    engine = make(POOL_BYTES)
    probe = aside(engine, world)
    time.sleep(0.05)
    assert not engine.thread.is_running, "not before there is something to read"
    assert probe.costs is None
    read = engine.read()
    read.start()
    assert finish(read) == ["DONE"]
    wait_until(lambda: probe.costs is not None)
    assert world.is_identical()
    read = engine.read(into=(other := torch.zeros_like(world.target)))
    world.decode.register_memory([(other.data_ptr(), other.numel(), 0, "")], "DRAM")
    read.start()
    assert finish(read) == ["DONE"]
    assert world.is_identical(other)


def test_reads_go_first(world: World, make):
    """A piece that would never end is not asked for while there is something to read."""
    engine = make(4096)
    pieces: list[int] = []

    def forever() -> Any:
        while True:
            pieces.append(len(engine.thread._reads))
            yield

    engine.thread.do_aside(forever())
    for _ in range(5):
        reads = [engine.read() for _ in range(3)]
        for read in reads:
            read.start()
        assert finish(*reads) == ["DONE"] * 3
    wait_until(lambda: len(pieces) > 5)
    assert set(pieces) == {0}
    assert world.is_identical()


def test_an_engine_that_sleeps_or_stops_half_way(world: World, make):
    engine = make(POOL_BYTES)
    stop = threading.Event()
    done: list[int] = []

    def pieces() -> Any:
        for number in range(6):
            done.append(number)
            stop.set()
            yield

    engine.thread.do_aside(pieces())
    while len(done) < 6:
        read = engine.read()
        read.start()
        assert finish(read) == ["DONE"]
        assert stop.wait(10)
        engine.thread.rest()
        stop.clear()
        if done[-1] == 5:
            break
    assert done == [0, 1, 2, 3, 4, 5], "it went on where it was"
    engine.thread.stop()
    assert engine.read().start() == "PROC"


def test_the_thread_still_ends_when_there_is_nothing_left(world: World, make, monkeypatch):
    monkeypatch.setattr("kvpatch.transfer.progress_thread._IDLE_SECONDS", 0.05)
    engine = make(POOL_BYTES)
    probe = aside(engine, world)
    read = engine.read()
    read.start()
    assert finish(read) == ["DONE"]
    wait_until(lambda: not engine.thread.is_running)
    assert probe.costs is not None


def test_nothing_is_measured_while_a_handshake_is_in_the_agent(world: World, make):
    engine = make(POOL_BYTES)
    inside: list[None] = []
    handshakes = engine.gate.side_of("add_remote_agent")

    def pieces() -> Any:
        inside.append(None)
        yield

    read = engine.read()
    read.start()
    assert finish(read) == ["DONE"]
    with handshakes._lock:
        engine.thread.do_aside(pieces())
        engine.thread._inbox.put(None)
        time.sleep(0.1)
        assert not inside
    wait_until(lambda: bool(inside))
