"""A staged read over real NIXL, two agents in one process; failures are injected, labelled."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import pytest
import torch
import wrapt

from kvpatch.core.errors import PoolExhausted
from kvpatch.observe.catalogue import CheckResult
from kvpatch.transfer import caches as caches_module
from kvpatch.transfer import staging_pool
from kvpatch.transfer.lease import Lease, Lifetime
from kvpatch.transfer.nixl import errors_of

from .staged_world import (
    OVER,
    SECONDS,
    Failing,
    finish,
    is_told_nothing,
    notifications,
    taken,
)

pytestmark = pytest.mark.lab


class LateStep:
    """Fake of a device's event: of a step that still writes into the blocks of a read's."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target, self._looks = target, 0

    def query(self) -> bool:
        self._looks += 1
        if self._looks == 4:
            self._target.fill_(0xA5)
        return self._looks >= 4


@pytest.mark.parametrize("waits", [True, False])
def test_what_goes_straight_to_its_place_waits_for_steps_before(world, monkeypatch, waits):
    """A step that was queued before the read began must not write over what the read brings."""
    step = LateStep(world.target)
    monkeypatch.setattr(caches_module.Caches, "mark", lambda self: step)
    read = world.read(world.pool(4096), is_direct=True)
    if not waits:  # negative control
        monkeypatch.setattr(read, "admit", lambda: None)
    read.start()
    assert finish(read) == ["DONE"]
    while not step.query():
        pass
    assert world.is_identical() == waits


class _LateWriter(wrapt.ObjectProxy):
    """Fake: transfers that are said to have failed, and write noise to their places late.

    As one does of which one part has failed: NIXL says so, and looks at no other part again.
    """

    def __init__(self, agent: Any, failing: int) -> None:
        super().__init__(agent)
        self._self_left = failing
        self._self_places: dict[int, Any] = {}
        self._self_failed: dict[int, np.ndarray] = {}
        self._self_kept: list[Any] = []

    def get_xfer_descs(self, descriptors: Any, kind: str) -> Any:
        made = self.__wrapped__.get_xfer_descs(descriptors, kind)
        self._self_kept.append(made)
        self._self_places[id(made)] = descriptors.copy()
        return made

    def initialize_xfer(self, operation: str, ours: Any, *more: Any) -> Any:
        handle = self.__wrapped__.initialize_xfer(operation, ours, *more)
        self._self_places[id(handle)] = self._self_places[id(ours)]
        return handle

    def transfer(self, handle: Any) -> Any:
        if not self._self_left:
            return self.__wrapped__.transfer(handle)
        self._self_left -= 1
        self._self_failed[id(handle)] = self._self_places[id(handle)]
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if id(handle) in self._self_failed:
            return "ERR"
        state = str(self.__wrapped__.check_xfer_state(handle))
        if state == "DONE":  # landed, and not placed yet
            for places in self._self_failed.values():
                for address, length, _ in places:
                    ctypes.memset(int(address), 0xA5, int(length))
        return state


def test_what_a_failed_transfer_writes_late_reaches_no_other_read(world, caplog):
    pool, agent = world.pool(8 * 4096), _LateWriter(world.decode, failing=1)
    read, other = world.read(pool, agent), world.read(pool, agent)
    read.start()
    assert finish(read) == ["ERR"]
    assert pool.taken_bytes == pool.lost_bytes > 0
    assert f"{pool.lost_bytes} of its {pool.size_bytes} bytes" in caplog.text
    read.release()
    other.start()
    assert finish(other) == ["DONE"]
    assert world.is_identical()
    assert pool.taken_bytes == pool.lost_bytes


@pytest.mark.parametrize("over", ["before it starts", "while it waits"])
def test_a_read_that_would_begin_too_late_fails(world, over, caplog):
    """The peer may have given its blocks to another request."""
    pool = world.pool(4096)
    held = taken(pool)
    before = world.target.clone()
    first, read = world.read(pool), world.read(pool)
    if over == "before it starts":
        read.lifetime = Lifetime(OVER)
    for one in (first, read):
        one.start()
        assert one.state() == ("ERR" if one is read and "before" in over else "PROC")
    read.lifetime.lease = OVER
    pool.give(held)
    assert finish(first) == ["DONE"], "negative control: it knows of no end"
    world.target.copy_(before)
    assert finish(read) == ["ERR"]
    assert torch.equal(world.target, before)
    assert "after P's lease must have run out" in caplog.text
    assert read.lifetime.verdict is CheckResult.EXPIRED
    assert pool.taken_bytes == 0


def test_what_lands_before_the_lease_is_over_is_read(world):
    """Whatever is done with it afterwards: it was the peer's when it came."""
    read = world.read(world.pool(1 << 20))
    read.lifetime = Lifetime(Lease(time.monotonic() + SECONDS))
    read.start()
    while read._landed_at is None or read._flights:
        read._land()
    read.lifetime.lease = Lease(read._landed_at)
    assert finish(read) == ["DONE"]
    assert world.is_identical()
    assert read.lifetime.verdict is None, "nobody has said that they were held"


def test_a_peer_that_cannot_be_notified_fails_no_read(world, monkeypatch, caplog):
    """It is gone, and all that was read of it is here."""
    agent, gone = Failing(world.decode, after=1 << 20), errors_of(world.decode)[0]

    def refuse(*_, **__):
        raise gone("REMOTE_DISCONNECT")

    monkeypatch.setattr(agent, "send_notif", refuse)
    read = world.read(world.pool(1 << 20), agent)
    read.start()
    assert finish(read) == ["DONE"]
    assert world.is_identical()
    assert "was not told that a request is over" in caplog.text


def test_what_is_on_the_wire_when_the_lease_ends_fails(world):
    read, told = world.read(world.pool(1 << 20)), []
    read.lifetime = Lifetime(fail_check=lambda: told.append("a"))
    read.start()
    read.lifetime.lease = OVER
    assert finish(read) == ["ERR"]
    assert told == ["a"]
    assert read.lifetime.verdict is CheckResult.EXPIRED
    assert is_told_nothing(world), "P keeps nothing that it could be told of"


def test_a_failed_chunks_space_comes_back_after_a_time(world, monkeypatch):
    monkeypatch.setattr(staging_pool, "_QUARANTINE_SECONDS", 0.3)
    pool = world.pool(3 * 4096)
    read = world.read(pool, Failing(world.decode, after=2))
    read.start()
    assert finish(read) == ["ERR"]
    read.release()
    lost = pool.lost_bytes
    assert lost, "it may still be written to"
    time.sleep(0.3)
    other = world.read(pool)
    other.start()
    assert finish(other) == ["DONE"], "the pool serves the next request"
    assert world.is_identical()
    assert pool.lost_bytes == 0
    assert b"done" in notifications(world)


def test_a_read_that_was_given_up_and_fails_then_keeps_its_space_for_a_time(world, monkeypatch):
    monkeypatch.setattr(staging_pool, "_QUARANTINE_SECONDS", 0.3)
    pool = world.pool(3 * 4096)
    agent = _LateWriter(world.decode, failing=1)
    read = world.read(pool, agent)
    read.start()
    read.release()
    asking, lost = pool.line_up(0, "other"), pool.lost_bytes
    assert lost
    with pytest.raises(PoolExhausted, match="KVPATCH_STAGING_BYTES"):
        pool.take(asking, 3 * 4096)
    assert pool.lost_bytes == lost
    time.sleep(0.3)
    assert pool.take(asking, 3 * 4096) is not None


def test_nixl_says_what_it_can_raise(world):
    errors = errors_of(world.decode)
    assert {"nixlBackendError", "nixlRemoteDisconnectError"} <= {e.__name__ for e in errors}
    with pytest.raises(errors):
        world.decode.initialize_xfer(
            "READ",
            world.decode.get_xfer_descs([(world.target.data_ptr(), 8, 0)], "DRAM"),
            world.decode.get_xfer_descs([(1 << 40, 8, 0)], "DRAM"),
            world.ends.agent,
        )
