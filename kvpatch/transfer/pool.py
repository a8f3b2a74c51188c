"""A worker's staging pool: bounded, registered once, shared in the order of asking."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

from kvpatch._errors import KvpatchError
from kvpatch.transfer.room import Room, Space

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.staging")

#: A round is small beside the pool, so that some are copied while others are on the wire.
_ROUNDS_IN_POOL = 4
_ROUND_BYTES = 16 * 1024**2


class PoolExhausted(KvpatchError):
    """Space is held by transfers of peers that are gone, and too little is left."""


class StagingPool:
    """Space for rounds of reads; made of memory when the first one asks.

    Reads get space in the order in which they first asked; nobody overtakes. A round
    never waits for more than one space, and whoever holds one gives it back when its
    own transfer and copy are done, so waiting ends.

    Args:
        size_bytes: of the whole pool.
        make: allocates and registers so many bytes.
    """

    def __init__(self, size_bytes: int, make: Callable[[int], torch.Tensor]) -> None:
        self._room = Room(size_bytes)
        self._make = make
        self._buffer: torch.Tensor | None = None
        # Weak: a release may drop a read without a word, and nobody may wait behind it.
        self._queue: deque[ref[object]] = deque()
        self._lost: list[tuple[Space, Callable[[], bool]]] = []

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
        return max(1, min(_ROUND_BYTES, self.size_bytes // _ROUNDS_IN_POOL))

    def take(self, reader: object, size_bytes: int) -> Space | None:
        """Space for a round of ``reader``; None where it has to wait and ask again.

        Raises:
            PoolExhausted: it would wait for ever.
        """
        self._recover()
        self._queue = deque(waiting for waiting in self._queue if waiting() is not None)
        if not any(waiting() is reader for waiting in self._queue):
            self._queue.append(ref(reader))
        if self._queue[0]() is not reader:
            return None
        if self._buffer is None:
            self._buffer = self._make(self.size_bytes)
            _LOG.info("staging pool of %d bytes made and registered", self.size_bytes)
        space = self._room.take(size_bytes)
        lost = sum(held.end - held.start for held, _ in self._lost)
        if space is None and lost and self.taken_bytes == lost:
            raise PoolExhausted(
                f"transfers from peers that are gone hold {lost} of the staging pool's "
                f"{self.size_bytes} bytes, and a round needs {size_bytes}: restart this engine, or "
                "give it a larger KVPATCH_STAGING_BYTES"
            )
        return space

    def leave(self, reader: object) -> None:
        """Takes a reader out of the queue: it needs no more space."""
        self._queue = deque(waiting for waiting in self._queue if waiting() is not reader)

    def give(self, space: Space) -> None:
        """Frees a round's space."""
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
                self._room.give(space)
            else:
                still.append((space, is_over))
        self._lost = still
