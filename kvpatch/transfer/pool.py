"""A worker's staging pool: bounded, registered once, shared in the order of asking."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

from kvpatch._errors import KvpatchError
from kvpatch.transfer.pace import Pace
from kvpatch.transfer.room import Room, Space

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.staging")

#: A round is small beside the pool, so that some are copied while others are on the wire.
_ROUNDS_IN_POOL = 4
#: In a processor's cache still when they are copied, two of them; half of it makes as many
#: posts more, each of which waits for NIXL's own thread to let go of its lock.
_LEAST_ROUND_BYTES = 8 * 1024**2
_HOST_ROUNDS_ON_WIRE = 2
#: On a device each copy is a launch or two.
_DEVICE_ROUND_BYTES = 16 * 1024**2


class PoolExhausted(KvpatchError):
    """Space is held by transfers of peers that are gone, and too little is left."""


class _Waiting(NamedTuple):
    """A reader that asked for space; weak, for a release may drop a read without a word."""

    reader: ref[object]
    peer: str


class StagingPool:
    """Space for rounds of reads; made of memory when the first one asks.

    Reads of one peer get space in the order in which they asked. A peer never holds more
    than it leaves free, so that one that hangs leaves room for the others; whoever asked
    first goes first, unless it waits for its own peer. Nobody waits while holding what
    another one waits for: a round needs one space, and gives it back when it is done.

    Args:
        size_bytes: of the whole pool.
        make: allocates and registers so many bytes.
        on_device: the copies out of it are made by a device, which nobody waits for.

    Attributes:
        rounds_on_wire: of one read. Few on a host: within one, NIXL reads while a round
            is posted, and what has landed grows cold.
    """

    def __init__(
        self,
        size_bytes: int,
        make: Callable[[int], torch.Tensor],
        on_device: bool = False,
    ) -> None:
        self._room = Room(size_bytes)
        most = max(1, size_bytes // _ROUNDS_IN_POOL)
        least = _DEVICE_ROUND_BYTES if on_device else _LEAST_ROUND_BYTES
        self.pace = Pace(least, min(least, most) if on_device else most)
        self.rounds_on_wire = size_bytes if on_device else _HOST_ROUNDS_ON_WIRE
        self._make = make
        self._buffer: torch.Tensor | None = None
        self._queue: list[_Waiting] = []
        self._held: Counter[str] = Counter()
        self._owner: dict[Space, str] = {}
        self._lost: list[tuple[Space, Callable[[], bool]]] = []

    def aside(self, size_bytes: int) -> StagingPool:
        """Another one of the same kind of memory, for what must not wait in this one."""
        return StagingPool(size_bytes, self._make)

    @property
    def size_bytes(self) -> int:
        """Of the whole pool, whether or not it has been made."""
        return self._room.size_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes that rounds hold at the moment."""
        return self._room.taken_bytes

    @property
    def round_bytes(self) -> int:
        """How large a round is at most, if its blocks are no larger."""
        return self.pace.round_bytes

    def take(self, reader: object, peer: str, size_bytes: int) -> Space | None:
        """Space for a round of ``reader``; None where it has to wait and ask again.

        Raises:
            PoolExhausted: it would wait for ever.
        """
        self._recover()
        self._queue = [waiting for waiting in self._queue if waiting.reader() is not None]
        if not any(waiting.reader() is reader for waiting in self._queue):
            self._queue.append(_Waiting(ref(reader), peer))
        if not self._is_next(reader, peer) or not self._is_within_share(peer, size_bytes):
            return None
        if self._buffer is None:
            self._buffer = self._make(self.size_bytes)
            _LOG.info("staging pool of %d bytes made and registered", self.size_bytes)
        space = self._room.take(size_bytes)
        if space is None:
            self._check_losses(size_bytes)
            return None
        self._held[peer] += size_bytes
        self._owner[space] = peer
        return space

    def _is_next(self, reader: object, peer: str) -> bool:
        """Whether nobody asked before who could take space now."""
        for waiting in self._queue:
            if waiting.reader() is reader:
                return True
            if waiting.peer == peer or not self._held[waiting.peer]:
                return False
        return False

    def _is_within_share(self, peer: str, size_bytes: int) -> bool:
        held = self._held[peer]
        left = self.size_bytes - self.taken_bytes - size_bytes
        return not held or left >= held + size_bytes

    def _check_losses(self, size_bytes: int) -> None:
        lost = sum(space.end - space.start for space, _ in self._lost)
        if lost and self.taken_bytes == lost:
            raise PoolExhausted(
                f"transfers from peers that are gone hold {lost} of the staging pool's "
                f"{self.size_bytes} bytes, and a round needs {size_bytes}: restart this engine, or "
                "give it a larger KVPATCH_STAGING_BYTES"
            )

    def leave(self, reader: object) -> None:
        """Takes a reader out of the queue: it needs no more space."""
        self._queue = [waiting for waiting in self._queue if waiting.reader() is not reader]

    def give(self, space: Space) -> None:
        """Frees a round's space."""
        self._held[self._owner.pop(space)] -= space.end - space.start
        self._room.give(space)

    def lose(self, space: Space, is_over: Callable[[], bool]) -> None:
        """Leaves a space taken until the transfer that may still write to it is over."""
        self._lost.append((space, is_over))

    def memory(self, space: Space) -> torch.Tensor:
        """The bytes of a space that was taken."""
        if self._buffer is None:
            raise ValueError("no space has been taken yet")
        return self._buffer[space.start : space.end]

    def _recover(self) -> None:
        still = []
        for space, is_over in self._lost:
            if is_over():
                self.give(space)
            else:
                still.append((space, is_over))
        self._lost = still
