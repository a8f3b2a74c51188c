"""A worker's staging pool: bounded, registered once, shared in the order of asking."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpatch.core.errors import PoolExhausted
from kvpatch.observe.book import Book
from kvpatch.observe.catalogue import POOL_BYTES, POOL_USED_BYTES, POOL_WAITING, POOL_WAITS
from kvpatch.transfer.nixl import errors_of

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.staging")

#: A chunk is small beside the pool, so that some are copied while others are on the wire.
_CHUNKS_IN_POOL = 4
#: In a processor's cache still when they are copied, two of them; half of it makes twice as many
#: posts, each of which waits for NIXL's own thread to let go of its lock.
_LEAST_CHUNK_BYTES = 8 * 1024**2
_HOST_CHUNKS_ON_WIRE = 2
#: On a device each copy is a launch or two, and what costs is the host's thread: one of 16 MiB kept
#: it busy for some 2 ms beside an H200 (docs/evidence/gpu.md), the time that a wire takes for more.
_DEVICE_CHUNK_BYTES = 32 * 1024**2
#: Many times what a transport goes on trying for after an error (UCX: 7 times, a second each).
_QUARANTINE_SECONDS = 120.0


class Space(NamedTuple):
    """The bytes ``start`` to ``end`` of a buffer."""

    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


class Room:
    """First fit over a buffer of ``size_bytes``; spaces that touch become one again."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free = [Space(0, size_bytes)]

    @property
    def taken_bytes(self) -> int:
        return self.size_bytes - sum(space.size_bytes for space in self._free)

    def take(self, size_bytes: int) -> Space | None:
        """The lowest free space of that size; None where there is none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size_bytes:
                rest = Space(start + size_bytes, end)
                self._free[index : index + 1] = [rest] if rest.size_bytes else []
                return Space(start, start + size_bytes)
        return None

    def give(self, space: Space) -> None:
        """Frees what :meth:`take` returned.

        Raises:
            ValueError: a part of it is free already.
        """
        free = sorted([*self._free, space])
        joined = [free[0]]
        for start, end in free[1:]:
            last = joined[-1]
            if start < last.end:
                raise ValueError(f"bytes {space.start} to {space.end} are free already")
            if start == last.end:
                joined[-1] = Space(last.start, end)
            else:
                joined.append(Space(start, end))
        self._free = joined


class _Lost(NamedTuple):
    """A space that a transfer may still write to."""

    space: Space
    is_over: Callable[[], bool]
    #: The peer whose transfer failed; None of one that was given up, which its peer holds still.
    failed_peer: str | None = None


@dataclass(eq=False, slots=True)
class Turn:
    """A reader's place among those of its peer.

    Attributes:
        reader: the number by which the progress thread knows the reader.
        is_first: True once it is the first of its peer. Others need not ask for space: a step asks
            thousands.
        has_left: True once it needs no more space.
        has_taken: True if it had space before.
        is_waiting: True if it waits for the first.
    """

    reader: int
    peer: str
    number: int
    is_first: bool = False
    has_left: bool = False
    has_taken: bool = False
    is_waiting: bool = False


class StagingPool:
    """Space for chunks of reads; made of memory when the first one asks.

    Reads of one peer get space in the order in which they asked. A peer never holds more
    than it leaves free, so that one that hangs or dies leaves room for the others; whoever
    asked first goes first, unless it waits for its own peer. Nobody waits while holding what
    another one waits for: a chunk needs one space, and gives it back when it is done.

    Args:
        size_bytes: of the whole pool.
        make: allocates and registers so many bytes.
        on_device: the copies out of it are made by a device, which nobody waits for.

    Attributes:
        chunks_on_wire: of one read. Few on a host: within one, NIXL reads while a chunk
            is posted, and what has landed grows cold.
        waiting: reads that wait for others before they can begin.
        waits: reads that ever had to.
        has_threads: whether NIXL's threads share a post of many runs, as far as is known.
    """

    def __init__(
        self, size_bytes: int, make: Callable[[int], torch.Tensor], on_device: bool = False
    ) -> None:
        self._room = Room(size_bytes)
        self._most_chunk_bytes = _DEVICE_CHUNK_BYTES if on_device else _LEAST_CHUNK_BYTES
        self.chunks_on_wire = size_bytes if on_device else _HOST_CHUNKS_ON_WIRE
        self._make = make
        self._buffer: torch.Tensor | None = None
        self._numbers = count()
        self._queues: dict[str, deque[Turn]] = {}
        #: The first peer that asked, and whether any other one ever has.
        self._first_peer = ""
        self._has_others = False
        #: The peer that holds each space.
        self._owner: dict[Space, str] = {}
        self._lost: deque[_Lost] = deque()
        #: Readers that have become the first of their peer, if somebody takes them out.
        self.called: deque[int] | None = None
        self.waiting = self.waits = 0
        self.has_threads = True

    @property
    def size_bytes(self) -> int:
        """Returns the size of the whole pool, even before its memory is allocated."""
        return self._room.size_bytes

    @property
    def chunk_bytes(self) -> int:
        """Returns the size of a chunk at most, if its blocks are no larger."""
        return min(self._most_chunk_bytes, max(1, self.size_bytes // _CHUNKS_IN_POOL))

    @property
    def is_made(self) -> bool:
        return self._buffer is not None

    @property
    def taken_bytes(self) -> int:
        return self._room.taken_bytes

    @property
    def lost_bytes(self) -> int:
        """Returns the bytes that no read can use because a transfer may still write to them."""
        return sum(one.space.size_bytes for one in self._lost)

    def tell(self, book: Book, rank: str) -> None:
        book.show(POOL_BYTES, self.size_bytes, rank)
        book.show(POOL_USED_BYTES, self.taken_bytes, rank)
        book.show(POOL_WAITING, self.waiting, rank)
        book.show(POOL_WAITS, self.waits)

    def line_up(self, reader: int, peer: str) -> Turn:
        """Returns a reader's place behind those that have asked before."""
        turn = Turn(reader, peer, next(self._numbers))
        self._first_peer = self._first_peer or peer
        self._has_others |= peer != self._first_peer
        self._queues.setdefault(peer, deque()).append(turn)
        return turn

    def take(self, turn: Turn, size_bytes: int) -> Space | None:
        """Returns space for a chunk; None where its reader has to wait and ask again.

        Raises:
            PoolExhausted: it would wait for ever.
        """
        self.recover()
        peer = turn.peer
        may_take = self._is_next(turn) and self._is_within_share(peer, size_bytes)
        space = self._space(size_bytes) if may_take else None
        if space is None:
            if not (turn.has_taken or turn.is_waiting):
                turn.is_waiting = True
                self.waiting += 1
                self.waits += 1
            return None
        self._end_wait(turn)
        turn.has_taken = True
        self._owner[space] = peer
        return space

    def _end_wait(self, turn: Turn) -> None:
        self.waiting -= turn.is_waiting
        turn.is_waiting = False

    def _first(self, peer: str) -> Turn | None:
        """Returns the turn that has waited longest among a peer's, and marks it as the first."""
        queue = self._queues.get(peer)
        while queue and queue[0].has_left:
            queue.popleft()
        if not queue:
            self._queues.pop(peer, None)
            return None
        if not queue[0].is_first:
            queue[0].is_first = True
            if self.called is not None:
                self.called.append(queue[0].reader)
        return queue[0]

    def _is_next(self, turn: Turn) -> bool:
        """True if no reader asked before that could take space now."""
        if self._first(turn.peer) is not turn:
            return False
        # Who holds some, or has lost some, may have to wait for its own.
        busy = {*self._owner.values(), *(one.failed_peer for one in self._lost)}
        idle = (self._first(peer) for peer in tuple(self._queues) if peer not in busy)
        return all(first is None or first.number >= turn.number for first in idle)

    def _is_within_share(self, peer: str, size_bytes: int) -> bool:
        """True if a peer leaves as much free as it holds, what its failed transfers hold included.

        Raises:
            PoolExhausted: its failed transfers alone hold too much.
        """
        failed = 0
        if self._has_others:  # nobody else needs what the only peer leaves
            failed = sum(one.space.size_bytes for one in self._lost if one.failed_peer == peer)
        if failed and self.size_bytes < 2 * (failed + size_bytes):
            raise self._exhausted(size_bytes)
        held = failed + sum(space.size_bytes for space, one in self._owner.items() if one == peer)
        left = self.size_bytes - self.taken_bytes - size_bytes
        return not held or left >= held + size_bytes

    def _space(self, size_bytes: int) -> Space | None:
        if self._buffer is None:
            self._buffer = self._made(size_bytes)
        space = self._room.take(size_bytes)
        if space is None:
            self._check_lost(size_bytes)
        if size_bytes > self.size_bytes:
            raise PoolExhausted(
                f"a chunk needs {size_bytes} bytes, and there was memory for a staging pool of "
                f"{self.size_bytes} alone",
                "leave this engine more free memory (a lower --gpu-memory-utilization)",
            )
        return space

    def _made(self, least_bytes: int) -> torch.Tensor:
        """Memory for all of the pool, or for half of it as often as there is too little."""
        import torch

        buffer = None
        while buffer is None:
            try:
                buffer = self._make(self.size_bytes)
            except (MemoryError, torch.OutOfMemoryError):
                if self.size_bytes // 2 < least_bytes:
                    raise
                _LOG.warning(
                    "there is no memory for a staging pool of %d bytes: it is made half as large, "
                    "and reads wait for room more often. A lower --gpu-memory-utilization leaves "
                    "more",
                    self.size_bytes,
                )
                self._room = Room(self.size_bytes // 2)
        _LOG.info("staging pool of %d bytes made and registered", self.size_bytes)
        return buffer

    def _check_lost(self, size_bytes: int) -> None:
        """Refuses to wait where nothing will be given back.

        Raises:
            PoolExhausted: all that is taken is lost.
        """
        for _ in range(len(self._lost)):
            before = len(self._lost)
            self.recover()
            if len(self._lost) < before:
                return
        if self._lost and self.taken_bytes <= self.lost_bytes:
            raise self._exhausted(size_bytes)

    def _exhausted(self, size_bytes: int) -> PoolExhausted:
        return PoolExhausted(
            f"transfers that failed or whose peers are gone hold {self.lost_bytes} of the staging "
            f"pool's {self.size_bytes} bytes, and a chunk needs {size_bytes}",
            "wait until the failed ones are surely over (two minutes), restart this engine, or "
            "give it a larger KVPATCH_STAGING_BYTES",
        )

    def leave(self, turn: Turn) -> None:
        """Takes a reader out of the queue: it needs no more space."""
        turn.has_left = True
        self._end_wait(turn)
        self._first(turn.peer)

    def give(self, space: Space) -> None:
        self._owner.pop(space, None)
        self._room.give(space)

    def lose(self, space: Space, is_over: Callable[[], bool], *, has_failed: bool = False) -> None:
        """Leaves a space taken until the transfer that may still write to it is over.

        Other reads of the same peer do not wait for one that has failed.
        """
        failed_peer = self._owner.pop(space, None) if has_failed else None
        self._lost.append(_Lost(space, is_over, failed_peer))

    def memory(self, space: Space) -> torch.Tensor:
        """The bytes of a space that was taken."""
        if self._buffer is None:
            raise ValueError("no space has been taken yet")
        return self._buffer[space.start : space.end]

    def let_go(self) -> torch.Tensor | None:
        """Returns its memory, to be given back; the next read that needs some allocates it anew.

        None where there is none, or a transfer may still write to it.
        """
        for _ in range(len(self._lost)):
            self.recover()
        if self.taken_bytes:
            return None
        buffer, self._buffer = self._buffer, None
        return buffer

    def recover(self) -> None:
        """Looks at what was lost for the longest time, and goes on where that is over."""
        while self._lost:
            first = self._lost.popleft()
            if not first.is_over():
                self._lost.append(first)
                return
            self.give(first.space)


def lose(
    nixl: Any, handle: Any, pool: StagingPool, space: Space, failed_agent: str | None = None
) -> None:
    """Keeps the space of a transfer that nobody waits for until that is over.

    Args:
        failed_agent: the peer that was read from, of a transfer that has failed. Its space is kept
            for a time: NIXL does not say when it is over.
    """
    has_failed = failed_agent is not None
    # NIXL does not tell when one that has failed is over: it is taken to be after a time.
    until = time.monotonic() + _QUARANTINE_SECONDS if has_failed else None

    def is_over() -> bool:
        """Tells whether the transfer is over, and lets go of it then."""
        nonlocal until
        if until is None:
            try:
                state = nixl.check_xfer_state(handle)
            except errors_of(nixl):
                _LOG.debug("a transfer that was given up has failed", exc_info=True)
                state = "ERR"
            if state == "PROC":
                return False
            if state != "DONE":
                until = time.monotonic() + _QUARANTINE_SECONDS
        if until is not None and time.monotonic() < until:
            return False
        try:
            nixl.release_xfer_handle(handle)
        except errors_of(nixl):
            _LOG.debug("a transfer that was given up could not be released", exc_info=True)
        return True

    pool.lose(space, is_over, has_failed=has_failed)
    if has_failed:
        _LOG.warning(
            "%d bytes of the staging pool, which a read from %s that failed may still write "
            "to, are not used for %d s; that is so of %d of its %d bytes",
            space.end - space.start,
            failed_agent,
            _QUARANTINE_SECONDS,
            pool.lost_bytes,
            pool.size_bytes,
        )
