"""A worker's staging pool: bounded, registered once, shared in the order of asking."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

from kvpatch.core.errors import PoolExhausted
from kvpatch.transfer.free_space import Room, Space

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.staging")

#: A chunk is small beside the pool, so that some are copied while others are on the wire.
_CHUNKS_IN_POOL = 4
#: In a processor's cache still when they are copied, two of them; half of it makes as many
#: posts more, each of which waits for NIXL's own thread to let go of its lock.
_LEAST_CHUNK_BYTES = 8 * 1024**2
_HOST_CHUNKS_ON_WIRE = 2
#: On a device each copy is a launch or two.
_DEVICE_CHUNK_BYTES = 16 * 1024**2


class Pace:
    """Of reads that go on in an engine's steps: follows how long these are apart.

    A small chunk is copied while it is in the processor's cache still. But with the next
    look comes the next chunk, and an engine looks once a step: a reader that is away for
    longer than it works finds chunks that landed long ago, and they double; one that is
    hardly away halves them.

    Args:
        least_bytes, most_bytes: chunks stay between the two.

    Attributes:
        has_threads: whether NIXL's threads share a post of many runs, as far as is known.
    """

    _HARDLY = 0.25

    def __init__(self, least_bytes: int, most_bytes: int) -> None:
        self._least = min(least_bytes, most_bytes)
        self._most = most_bytes
        self.chunk_bytes = min(2 * least_bytes, most_bytes)
        self.has_threads = True

    def looked(self, away_seconds: float, working_seconds: float) -> None:
        """A look that found a chunk: how long it was after the last one, and that one took."""
        if away_seconds > working_seconds:
            self.chunk_bytes = min(2 * self.chunk_bytes, self._most)
        elif away_seconds < self._HARDLY * working_seconds:
            self.chunk_bytes = max(self.chunk_bytes // 2, self._least)


class _Lost(NamedTuple):
    """A space that a transfer may still write to."""

    space: Space
    is_over: Callable[[], bool]
    has_failed: bool


@dataclass
class _Retired:
    """A buffer that nobody uses until no transfer may write to it any more."""

    buffer: torch.Tensor | None
    lost: deque[_Lost]


class Turn:
    """A reader's place among those of its peer; weak, for a release may drop a read.

    Attributes:
        is_first: of its peer. Who is not need not ask for space: a step asks thousands.
        has_taken: whether it had space before; and
        is_waiting: whether it waits for the first.
    """

    __slots__ = (
        "_reader",
        "has_left",
        "has_taken",
        "is_first",
        "is_waiting",
        "key",
        "number",
        "peer",
    )

    def __init__(self, reader: object, peer: str, number: int) -> None:
        self._reader = ref(reader)
        self.key = id(reader)
        self.peer = peer
        self.number = number
        self.is_first = self.has_left = self.is_waiting = self.has_taken = False

    @property
    def reader(self) -> object:
        """Whose place it is; None where it was dropped."""
        return self._reader()

    def is_of(self, reader: object) -> bool:
        """Whether it is this one's; another one can have the id of one that was dropped."""
        return self._reader() is reader

    @property
    def is_over(self) -> bool:
        """Whether nobody waits here any more."""
        return self.has_left or self._reader() is None


class StagingPool:
    """Space for chunks of reads; made of memory when the first one asks.

    Reads of one peer get space in the order in which they asked. A peer never holds more
    than it leaves free, so that one that hangs leaves room for the others; whoever asked
    first goes first, unless it waits for its own peer. Nobody waits while holding what
    another one waits for: a chunk needs one space, and gives it back when it is done.

    Where transfers that have failed leave too little, a second buffer of the same size takes the
    place of the first, until nothing may write to that one any more: a peer that died does not
    keep others waiting. There are never more than two.

    Args:
        size_bytes: of the whole pool.
        make: allocates and registers so many bytes.
        on_device: the copies out of it are made by a device, which nobody waits for.

    Attributes:
        chunks_on_wire: of one read. Few on a host: within one, NIXL reads while a chunk
            is posted, and what has landed grows cold.
        waiting: reads that wait for others before they can begin.
        waits: reads that ever had to.
    """

    def __init__(
        self,
        size_bytes: int,
        make: Callable[[int], torch.Tensor],
        on_device: bool = False,
    ) -> None:
        self._room = Room(size_bytes)
        most = max(1, size_bytes // _CHUNKS_IN_POOL)
        least = _DEVICE_CHUNK_BYTES if on_device else _LEAST_CHUNK_BYTES
        self.pace = Pace(least, min(least, most) if on_device else most)
        self._paced_bytes = min(least, most)
        self.chunks_on_wire = size_bytes if on_device else _HOST_CHUNKS_ON_WIRE
        self._make = make
        self._buffer: torch.Tensor | None = None
        self._numbers = count()
        self._turns: dict[int, Turn] = {}
        self._queues: dict[str, deque[Turn]] = {}
        #: The first of each peer that holds nothing, in the order of asking; and others.
        self._idle: list[tuple[int, Turn]] = []
        self._held: dict[str, int] = {}
        self._owner: dict[Space, str] = {}
        self._lost: deque[_Lost] = deque()
        self._retired: _Retired | None = None
        self._spare: torch.Tensor | None = None
        #: Where those are put who have become the first of their peer, if somebody takes them out.
        self.called: deque[object] | None = None
        self.waiting = self.waits = 0

    @property
    def size_bytes(self) -> int:
        """Of the whole pool, whether or not it has been made."""
        return self._room.size_bytes

    @property
    def is_made(self) -> bool:
        """True if it has its memory."""
        return self._buffer is not None

    @property
    def taken_bytes(self) -> int:
        """Bytes that chunks hold at the moment."""
        return self._room.taken_bytes

    @property
    def lost_bytes(self) -> int:
        """Bytes that nobody uses because a transfer may still write to them."""
        retired = self._retired.lost if self._retired is not None else ()
        return _bytes_of(self._lost) + _bytes_of(retired)

    def chunk_bytes(self, *, is_paced: bool = False) -> int:
        """How large a chunk is at most, if its blocks are no larger.

        Args:
            is_paced: of a read of the progress thread, which is never away.
        """
        return self._paced_bytes if is_paced else self.pace.chunk_bytes

    def take(self, reader: object, peer: str, size_bytes: int) -> Space | None:
        """Space for a chunk of ``reader``; None where it has to wait and ask again.

        Raises:
            PoolExhausted: it would wait for ever.
        """
        self.recover()
        turn = self._turns.get(id(reader))
        if turn is None or not turn.is_of(reader):
            turn = self._line_up(reader, peer)
        may_take = self._is_next(turn) and self._is_within_share(peer, size_bytes)
        space = self._space(size_bytes) if may_take else None
        if space is None:
            self._book_wait(turn)
            return None
        self._end_wait(turn)
        turn.has_taken = True
        self._held[peer] = self._held.get(peer, 0) + size_bytes
        self._owner[space] = peer
        return space

    def _book_wait(self, turn: Turn) -> None:
        if not (turn.has_taken or turn.is_waiting):
            turn.is_waiting = True
            self.waiting += 1
            self.waits += 1

    def _end_wait(self, turn: Turn) -> None:
        self.waiting -= turn.is_waiting
        turn.is_waiting = False

    def turn(self, reader: object) -> Turn | None:
        """The place of a reader that has asked for space and waits."""
        turn = self._turns.get(id(reader))
        return turn if turn is not None and turn.is_of(reader) else None

    def _line_up(self, reader: object, peer: str) -> Turn:
        self._leave(id(reader))
        turn = self._turns[id(reader)] = Turn(reader, peer, next(self._numbers))
        self._queues.setdefault(peer, deque()).append(turn)
        return turn

    def _first(self, peer: str) -> Turn | None:
        """Who waits for the longest among a peer's, and is told so."""
        queue = self._queues.get(peer)
        while queue and queue[0].is_over:
            turn = queue.popleft()
            self._end_wait(turn)
            if self._turns.get(turn.key) is turn:
                del self._turns[turn.key]
        if not queue:
            self._queues.pop(peer, None)
            return None
        if not queue[0].is_first:
            queue[0].is_first = True
            if self.called is not None:
                self.called.append(queue[0].reader)
            self._offer(queue[0])
        return queue[0]

    def _offer(self, turn: Turn) -> None:
        if not self._held.get(turn.peer):
            heappush(self._idle, (turn.number, turn))

    def _is_next(self, turn: Turn) -> bool:
        """Whether nobody asked before who could take space now."""
        if self._first(turn.peer) is not turn:
            return False
        while self._idle:
            number, first = self._idle[0]
            if not first.is_over and not self._held.get(first.peer):
                return turn.number <= number
            heappop(self._idle)
            self._first(first.peer)
        return True

    def _is_within_share(self, peer: str, size_bytes: int) -> bool:
        held = self._held.get(peer, 0)
        left = self.size_bytes - self.taken_bytes - size_bytes
        return not held or left >= held + size_bytes

    def _space(self, size_bytes: int) -> Space | None:
        if self._buffer is None:
            self._buffer = self._made(size_bytes)
        space = self._room.take(size_bytes)
        if space is None and self._is_replaced(size_bytes):
            self._buffer = self._made(size_bytes)
            space = self._room.take(size_bytes)
        if size_bytes > self.size_bytes:
            raise PoolExhausted(
                f"a chunk needs {size_bytes} bytes, and there was memory for a staging pool of "
                f"{self.size_bytes} alone",
                "leave this engine more free memory (a lower --gpu-memory-utilization)",
            )
        return space

    def _made(self, least_bytes: int) -> torch.Tensor:
        """Memory for all of the pool, or for half of it as often as there is too little."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            return spare
        buffer = None
        while buffer is None:
            try:
                buffer = self._make(self.size_bytes)
            except out_of_memory():
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

    def _is_replaced(self, size_bytes: int) -> bool:
        """Whether another buffer has taken the place of one that too little is left of.

        Raises:
            PoolExhausted: there is none, and nobody will give back.
        """
        lost = _bytes_of(self._lost)
        if not lost or self.taken_bytes > lost:
            return False  # others will give back
        for _ in range(len(self._lost)):
            before = len(self._lost)
            self.recover()
            if len(self._lost) < before:
                return False
        lost = _bytes_of(self._lost)
        if not lost:
            return False
        if size_bytes <= self.size_bytes and self._retire():
            return True
        raise PoolExhausted(
            f"transfers that failed or whose peers are gone hold {lost} of the staging pool's "
            f"{self.size_bytes} bytes, and a chunk needs {size_bytes}",
            "wait until the failed ones are surely over (two minutes), restart this engine, or "
            "give it a larger KVPATCH_STAGING_BYTES",
        )

    def _retire(self) -> bool:
        """Puts the buffer aside where a transfer that has failed holds some of it.

        All that is taken of it is lost then, so that nobody is about to place what lies there.
        """
        if self._retired is not None or not any(lost.has_failed for lost in self._lost):
            return False
        for lost in self._lost:
            self._disown(lost.space)
        self._retired = _Retired(self._buffer, self._lost)
        self._buffer, self._lost = None, deque()
        self._room = Room(self.size_bytes)
        _LOG.warning(
            "a second staging pool of %d bytes takes the place of one that transfers which failed "
            "may still write to",
            self.size_bytes,
        )
        return True

    def leave(self, reader: object) -> None:
        """Takes a reader out of the queue: it needs no more space."""
        self._leave(id(reader))

    def _leave(self, key: int) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            turn.has_left = True
            self._end_wait(turn)
            self._first(turn.peer)

    def give(self, space: Space) -> None:
        """Frees a chunk's space."""
        self._disown(space)
        self._room.give(space)

    def _disown(self, space: Space) -> None:
        peer = self._owner.pop(space, None)
        if peer is None:
            return
        self._held[peer] -= space.end - space.start
        if not self._held[peer]:
            del self._held[peer]
            first = self._first(peer)
            if first is not None:
                self._offer(first)

    def lose(self, space: Space, is_over: Callable[[], bool]) -> None:
        """Leaves a space taken until the transfer that may still write to it is over."""
        self._lost.append(_Lost(space, is_over, has_failed=False))

    def quarantine(self, space: Space, is_over: Callable[[], bool]) -> None:
        """As :meth:`lose`, of a transfer that has failed: its peer need not wait for that."""
        self._disown(space)
        self._lost.append(_Lost(space, is_over, has_failed=True))

    def memory(self, space: Space) -> torch.Tensor:
        """The bytes of a space that was taken."""
        if self._buffer is None:
            raise ValueError("no space has been taken yet")
        return self._buffer[space.start : space.end]

    def recover(self) -> None:
        """Looks at what was lost for the longest time, and goes on where that is over."""
        for lost in _over(self._lost):
            self.give(lost.space)
        if self._retired is not None:
            for _ in _over(self._retired.lost):
                pass
            if not self._retired.lost:
                self._spare, self._retired = self._retired.buffer, None


def out_of_memory() -> tuple[type[Exception], ...]:
    """Returns the errors that say that a device or the host has no memory left."""
    import torch

    return MemoryError, torch.OutOfMemoryError


def _bytes_of(lost: Iterable[_Lost]) -> int:
    return sum(one.space.end - one.space.start for one in lost)


def _over(lost: deque[_Lost]) -> Iterator[_Lost]:
    """Those in turn of which nothing is on the wire; the first that is not goes behind."""
    for _ in range(len(lost)):
        first = lost.popleft()
        if not first.is_over():
            lost.append(first)
            return
        yield first
