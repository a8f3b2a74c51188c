"""The order of work on a device with streams, on one that does it as late as it may.

Each test has a negative control: without the wait that it is about, bytes are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvpatch.checks.cache_digests import DigestStream
from kvpatch.host_buffer.host_pool import HostPool
from kvpatch.transfer import kernel_thread
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.staging_pool import StagingPool
from tests.geometry.slow_digests import as_numbers

from .digest_world import Engine, Rank, digested, request_of
from .late_device import LateEvent, LateModule, LateStream, LateTensor, Wire, late
from .staged_world import DRAM, World

__all__ = ["late"]
pytestmark = pytest.mark.patching

STALE = 0xA5


@contextmanager
def without(kind: type, name: str) -> Iterator[None]:
    """Takes a wait away from the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, lambda *_: True)
        yield


def test_threads_of_ours_are_on_the_engines_device(late: LateModule, untried: None) -> None:
    """A thread goes back to its own device behind a stream, and the first GPU is many ranks'."""
    device = torch.device("late", 0)
    assert kernel_thread.is_ready(device, "a kernel", lambda: True)
    DigestStream(device).settle()
    assert [one for _, one in late.of_threads] == [device, device]
    assert [name.rpartition("_")[0] for name, _ in late.of_threads] == [
        "kvpatch-kernels",
        "kvpatch-digests",
    ]


class LateWorld(World):
    """P's cache in host memory, and D's on the late device."""

    def __init__(self, late: LateModule) -> None:
        noise = np.random.default_rng(0)
        source, target = (
            torch.from_numpy(noise.integers(0, 256, 3 * 12 * 2 * 2 * 32 * 16 * 2, dtype=np.uint8))
            for _ in "PD"
        )
        self.late = late
        super().__init__(None, Wire(), source, target, Ends(DRAM, DRAM, "P"))

    def load(self, *, is_direct: bool = False) -> tuple[str, bool, bool]:
        """Loads a request while a step of the model is still queued that writes to all blocks.

        Returns:
            (outcome, whether all of it is there, whether the next step has begun).
        """
        cache = LateTensor(self.target)
        pool = StagingPool(
            65536, lambda size: LateTensor(torch.zeros(size, dtype=torch.uint8)), on_device=True
        )
        cache.fill_(STALE)  # by a step for the request that had the blocks before
        read = self.read(pool, into=cache, is_direct=is_direct)
        read.tails = self.tails
        read.admit()
        next_step = torch.zeros(1, dtype=torch.uint8)
        LateTensor(next_step).fill_(1)
        state = "PROC"
        for _ in range(200):
            state = read.state() if state == "PROC" else state
        is_there = bool(self.target.ne(STALE).any())
        has_begun = bool(next_step)
        self.late.model.synchronize()
        return state, is_there and self.is_identical() and self.is_zeroed(), has_begun


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_read_comes_after_steps_that_were_queued_before(late, is_direct):
    """By the staging pool, and straight to its place; and waits for no later step."""
    assert LateWorld(late).load(is_direct=is_direct) == ("DONE", True, False)


@pytest.mark.parametrize(
    ("kind", "wait", "is_direct"),
    [
        (LateStream, "wait_event", False),
        (LateEvent, "query", False),  # it is reported before its copies are done
        (LateEvent, "query", True),  # and this one goes to its place before the step
    ],
)
def test_a_read_without_its_wait_is_written_over(late, kind, wait, is_direct):
    with without(kind, wait):
        state, is_right, _ = LateWorld(late).load(is_direct=is_direct)
    assert (state, is_right) == ("DONE", False)


class Saved:
    """A host pool of a device's blocks, and two of these as a queued step leaves them."""

    def __init__(self, late: LateModule) -> None:
        noise = np.random.default_rng(1).integers(0, 256, (6, 4, 16), dtype=np.uint8)
        cache = LateTensor(torch.from_numpy(noise))
        pool = HostPool({"layer.0": cache}, {"layer.0": 0}, 6, 4)
        late.model.synchronize()
        cache[2].fill_(7)
        cache[4].fill_(9)
        pool.save([2, 4, 1], [1, 2, 0])
        cache[2].fill_(STALE)  # by the next step
        pool.settle()
        self.host = pool.tensors["layer.0"].clone()
        self.first = torch.from_numpy(noise)[1]

    @property
    def is_right(self) -> bool:
        host = self.host
        return bool((host[1] == 7).all() and (host[2] == 9).all() and host[0].equal(self.first))


def test_blocks_are_saved_after_the_step_that_fills_them(late: LateModule) -> None:
    assert Saved(late).is_right


@pytest.mark.parametrize(
    ("kind", "wait"), [(LateStream, "wait_stream"), (LateEvent, "synchronize")]
)
def test_a_save_without_its_wait_is_of_other_bytes(late: LateModule, kind: type, wait: str) -> None:
    """Of what a block had before the step; or of nothing, where the copy is not waited for."""
    real = HostPool._save_and_look
    with pytest.MonkeyPatch.context() as patch:

        def proven(pool: HostPool, *blocks: Any) -> None:
            real(pool, *blocks)
            patch.setattr(kind, wait, lambda *_: None)

        patch.setattr(HostPool, "_save_and_look", proven)
        assert not Saved(late).is_right


@pytest.mark.parametrize("waits", [True, False])
def test_digests_are_of_what_was_queued_before(late: LateModule, waits: bool) -> None:
    engine = Engine(request_of(), Rank())
    expected, held = engine.digests(), engine.memory.clone()
    engine.memory.fill_(STALE)
    memory = LateTensor(engine.memory)
    memory.copy_(held, non_blocking=True)  # by the step that computes the prompt
    stream = DigestStream(memory.device)
    after = stream.mark() if waits else None
    layers = (plane.layer for plane in engine.planes)
    memories = dict.fromkeys(layers, Bytes(engine.address, memory))
    with stream.inside(after):
        found = digested(memories, engine.planes, engine.blocks, 16, (0, 70))
    stream.thread.shutdown()
    assert (as_numbers(found) == as_numbers(expected)) is waits
