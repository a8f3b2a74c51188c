"""P and D in one process, over real NIXL, and one request between two unlike caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import wrapt

from kvpatch.geometry.direct_plan import Plan, plan_parts
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Memory, Plane
from kvpatch.geometry.segments import BlockList, Segments, pair_blocks, uncovered_tail
from kvpatch.geometry.staged_plan import Share, plan_chunks
from kvpatch.transfer.agent_gate import AgentGate, ProgressAgent
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.copying_thread import CopyingThread
from kvpatch.transfer.lease import Lease
from kvpatch.transfer.nixl import Ends, prepare_read
from kvpatch.transfer.own_read import OwnRead
from kvpatch.transfer.progress_thread import BackgroundRead, ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import Space, StagingPool
from tests.geometry.whole_caches import CacheSizes, as_array, named_layout

DRAM = Memory("DRAM")
SIZES = CacheSizes(layers=3, blocks=12, heads=2, block_tokens=32, channels=16, item_bytes=2)
LOCAL_SIZES = replace(SIZES, block_tokens=48, blocks=8)
TOKENS = 300
SECONDS = 300.0
#: A lease that has run out long ago.
OVER = Lease(0.0)
#: Worlds of the shared agents: what those know of is never given back, nor handed out again.
_SHARING: list[World] = []


class Failing(wrapt.ObjectProxy):
    """A real agent one of whose transfers is said to have failed (a stand-in for a dead peer)."""

    def __init__(self, agent: Any, after: int) -> None:
        super().__init__(agent)
        self._self_after = after

    def check_xfer_state(self, handle: Any) -> str:
        self._self_after -= 1
        if self._self_after < 0:
            return "ERR"
        return str(self.__wrapped__.check_xfer_state(handle))


@dataclass
class World:
    """P's and D's agents, caches and a request of theirs."""

    prefill: Any
    decode: Any
    source: torch.Tensor
    target: torch.Tensor
    ends: Ends
    #: What stays registered after the test has let go of it.
    kept: list[Any] = field(default_factory=list)
    #: Before each of this world's notifications.
    mark: bytes = field(default_factory=lambda: b"%d " % len(_SHARING))

    def read(
        self, pool: StagingPool, agent: Any = None, *, into: torch.Tensor | None = None, **how: Any
    ) -> StagedRead:
        """A new staged read of the whole request, in chunks of a block or more.

        Args:
            into: D's cache, where it is not the world's.
            how: ``is_direct``: straight to its place; all else as StagedRead takes it.
        """
        target = self.target if into is None else into
        remote = named_layout("LBNHC").planes(SIZES, self.source.data_ptr(), DRAM)
        local = named_layout("LBHNC").planes(LOCAL_SIZES, target.data_ptr(), DRAM)
        layers = dict.fromkeys(plane.layer for plane in remote)
        overlaps = overlaps_of([[p for p in remote if p.layer == layer] for layer in layers], local)
        segments = pair_blocks(
            BlockList(block_ids(10, 12), 32), BlockList(block_ids(7, 8), 48), 0, TOKENS
        )
        least = max(overlap.staged_bytes for overlap in overlaps)
        chunks = plan_chunks([Share(segments, overlaps)], max(least, pool.chunk_bytes))
        caches = Caches(dict.fromkeys(layers, target))
        direct: Iterator[Plan] = iter(())
        if how.pop("is_direct", False):
            copies = [copy for overlap in overlaps for copy in overlap.copies]
            direct, chunks = plan_parts([(segments, copies)]), iter(())
        return StagedRead(
            agent or self.decode,
            pool,
            caches,
            self.ends,
            self.mark + b"done",
            direct,
            chunks,
            **how,
        )

    def tails(self) -> list[tuple[Sequence[Plane], Segments]]:
        """What the request leaves untouched in its last block."""
        planes = named_layout("LBHNC").planes(LOCAL_SIZES, self.target.data_ptr(), DRAM)
        return [(planes, uncovered_tail(BlockList(block_ids(7, 8), 48), TOKENS))]

    def is_zeroed(self) -> bool:
        """Whether nothing is left there, in D's cache."""
        ((planes, tail),) = self.tails()
        return not any(
            as_array(plane, self.target.numpy(), self.target.data_ptr())[
                block, :, offset : offset + tokens
            ].any()
            for plane in planes
            for block, offset, tokens in zip(
                tail.local_block, tail.local_offset, tail.tokens, strict=True
            )
        )

    def pool(self, size_bytes: int) -> StagingPool:
        """A pool of memory that D has registered."""

        def make(size: int) -> torch.Tensor:
            buffer = torch.zeros(size, dtype=torch.uint8)
            self.kept.append(buffer)
            self.decode.register_memory([(buffer.data_ptr(), size, 0, "")], "DRAM")
            return buffer

        return StagingPool(size_bytes, make)

    def settle(self) -> None:
        """Waits for what was cancelled, by a read that comes behind it.

        NIXL forgets what it has cancelled, and UCX does not: of a connection that is closed with
        some of that left it ends the process (``ucs_arbiter_group_is_empty``).
        """
        memory = (self.source, self.target)
        places = (np.array([one.data_ptr()], dtype=np.uint64) for one in memory)
        handle = prepare_read(self.decode, self.ends, *places, np.array([self.target.numel()]))
        agent = type(self.decode)  # a test may have made up what this one says
        state, end = agent.transfer(self.decode, handle), time.monotonic() + SECONDS
        while state == "PROC" and time.monotonic() < end:
            state = agent.check_xfer_state(self.decode, handle)
        if state != "DONE":
            raise RuntimeError(f"the last read of a test ended as {state}")

    def is_identical(self, into: torch.Tensor | None = None) -> bool:
        """Whether D's cache holds what P's does, at every token, head and channel."""
        target = self.target if into is None else into
        remote = named_layout("LBNHC").planes(SIZES, 0, DRAM)
        local = named_layout("LBHNC").planes(LOCAL_SIZES, 0, DRAM)
        at = np.arange(TOKENS)
        return all(
            np.array_equal(
                as_array(theirs, self.source.numpy(), 0)[block_ids(10, 12)[at // 32], :, at % 32],
                as_array(ours, target.numpy(), 0)[block_ids(7, 8)[at // 48], :, at % 48],
            )
            for theirs, ours in zip(remote, local, strict=True)
        )


def taken(pool: StagingPool) -> Space:
    """Space that another peer's read holds."""
    turn = pool.line_up(0, "other")
    space = pool.take(turn, 4096)
    pool.leave(turn)
    assert space is not None
    return space


class Engine:
    """One worker's threads, pool and gate.

    Args:
        is_beside: what was read is copied by a thread of its own, whatever cores this machine has.
    """

    def __init__(self, world: World, pool_bytes: int, *, is_beside: bool = False) -> None:
        self.world = world
        self.gate = AgentGate()
        self.pool = world.pool(pool_bytes)
        self.thread = ProgressThread(self.pool, torch.device("cpu"), self.gate)
        self.copying = self.thread.copying = CopyingThread(self.thread.wake) if is_beside else None

    def staged(self, agent: Any = None, **how: Any) -> StagedRead:
        """A read that goes on when it is asked for its state."""
        read = self.world.read(
            self.pool, ProgressAgent(agent or self.world.decode, self.gate), **how
        )
        read._caches.thread = self.copying
        return read

    def read(self, agent: Any = None, **how: Any) -> BackgroundRead:
        return BackgroundRead(self.staged(agent, **how), self.thread)

    def load(self) -> None:
        """A read of the whole request, which has to come."""
        read = self.read()
        read.start()
        assert finish(read) == ["DONE"]
        assert self.world.is_identical()

    def stop(self) -> None:
        self.thread.stop()
        assert not self.thread.is_running
        assert not threads_of_ours()


def threads_of_ours(*kinds: str) -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    kinds = kinds or ("kvpatch-reads", "kvpatch-copies")
    return [name for name in names if name.startswith(kinds)]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 4 * SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(1e-3)


def stays(call: Callable[[], object], answer: object, seconds: float = 0.02) -> None:
    """Asserts that a call has this answer for a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert call() == answer


class Held:
    """Stands in for work that waits in its middle until it may go on."""

    def __init__(self) -> None:
        self.is_in, self.may_go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.is_in.set()
        assert self.may_go.wait(SECONDS)


def waits_for(call: Callable[[], object], held: Held) -> None:
    """Makes a call, which has to wait for what is held and for no more."""
    caller = threading.Thread(target=call)
    caller.start()
    caller.join(0.05)
    assert caller.is_alive(), "the work is under way"
    held.may_go.set()
    caller.join(SECONDS)
    assert not caller.is_alive()


def block_ids(count: int, of: int) -> np.ndarray:
    return np.random.default_rng(count).permutation(of)[:count]


@contextmanager
def connected_world(table: Callable[[Any], Any] | None = None) -> Iterator[World]:
    """P and D, and a cache of noise each; they part when nothing is on its way any more.

    Args:
        table: What each registers besides, before it is heard of; then :attr:`World.kept` has both.
    """
    prefill, decode = _agents() if table is None else _shared_agents()
    noise = np.random.default_rng(0)
    size = 3 * 12 * 2 * 2 * 32 * 16 * 2
    memory = [torch.from_numpy(noise.integers(0, 256, size, dtype=np.uint8)) for _ in "PD"]
    for agent, bytes_ in zip((prefill, decode), memory, strict=True):
        agent.register_memory([(bytes_.data_ptr(), bytes_.numel(), 0, "")], "DRAM")
    kept = [table(agent) for agent in (prefill, decode) if table is not None]
    name = decode.add_remote_agent(prefill.get_agent_metadata())
    name = name.decode() if isinstance(name, bytes) else name
    world = World(prefill, decode, *memory, Ends(DRAM, DRAM, name), kept)
    if table is not None:
        _SHARING.append(world)
    yield world
    world.settle()


@dataclass
class Tables:
    """P's table of one kind and D's."""

    prefill: Any
    decode: Any
    world: World

    def until_known(self, ask: Callable[[Any], Any]) -> Any:
        """Asks with D's agent until there is an answer."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            found = ask(self.world.decode)
            if found is not None:
                return found
        raise TimeoutError


def _agents() -> tuple[Any, Any]:
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(num_threads=1, capture_telemetry=True)  # as the releases do
    prefill, decode = (nixl_agent(f"{n}-{time.time_ns()}", config) for n in "PD")
    return prefill, decode


@cache
def _shared_agents() -> tuple[Any, Any]:
    """Of this process, one world after the other: they take longer than most tests of tables.

    Whole reads have agents of their own: the first transfer between two takes longer than those
    behind it, and gives a test the time to give a read up.
    """
    return _agents()


def finish(*reads: OwnRead) -> list[str]:
    """Polls reads as a release does, until none is in progress."""
    end = time.monotonic() + SECONDS
    states = ["PROC"]
    while "PROC" in states and time.monotonic() < end:
        states = [read.state() for read in reads]
    return states


def notifications(world: World, seconds: float = SECONDS) -> list[bytes]:
    """What P is told first; none where nothing comes in time."""
    found: list[bytes] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and not found:
        told = [m for messages in world.prefill.get_new_notifs().values() for m in messages]
        found += [m.removeprefix(world.mark) for m in told if m.startswith(world.mark)]
    return found


def is_told_nothing(world: World) -> bool:
    """True if nothing comes to P in some hundred times what a notification takes."""
    return not notifications(world, 0.1)
