"""Makes what a release drives like a transfer of what is to be read from one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpatch.geometry.direct_plan import Plan
from kvpatch.geometry.staged_plan import Share, plan_chunks
from kvpatch.load.read_request import ReadRequest
from kvpatch.transfer.lifetime import Lifetime
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.own_read import Fate
from kvpatch.transfer.plane_bytes import Tails
from kvpatch.transfer.progress_thread import BackgroundRead, ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.transfer.storageless import AnyCaches
from kvpatch.transfer.unposted import Unposted


@dataclass(frozen=True)
class Progress:
    """A worker's progress thread, and the worker's NIXL agent as that thread may use it."""

    thread: ProgressThread
    agent: Any


class Wanted(NamedTuple):
    """What is to be read.

    Attributes:
        direct: goes straight to its place; planned once the read has begun.
        staged: goes through the pool.
        tails: is zeroed once the read has begun; None for nothing.
        idle_until: where all that the rank has comes from others, of a read of those: the rank is
            only told, once that one is over.
    """

    direct: Iterable[Plan]
    staged: Sequence[Share] = ()
    tails: Callable[[], Tails] | None = None
    idle_until: Fate | None = None


@dataclass(frozen=True)
class ReadFactory:
    """Of one worker.

    Attributes:
        pool: where staged reads land.
        caches: where they are placed.
        progress: None where reads go on in the engine's steps.
    """

    pool: StagingPool
    caches: AnyCaches
    progress: Progress | None

    def read(
        self,
        nixl: Any,
        ends: Ends,
        notification: bytes,
        wanted: Wanted,
        request: ReadRequest,
        lifetime: Lifetime,
    ) -> StagedRead | BackgroundRead:
        """A read that is not started.

        Args:
            nixl: the engine's agent.
            notification: what the peer is told after the last byte.
            lifetime: of the peer's blocks.
        """
        chunks = plan_chunks(wanted.staged, self.pool.chunk_bytes)
        read = StagedRead(
            nixl if self.progress is None else self.progress.agent,
            self.pool,
            self.caches,
            ends,
            notification,
            Unposted(wanted.direct, chunks),
        )
        read.lifetime = lifetime
        read.tails = wanted.tails
        read.idle_until = wanted.idle_until
        own = read if self.progress is None else BackgroundRead(read, self.progress.thread)
        own.owner = request
        return own
