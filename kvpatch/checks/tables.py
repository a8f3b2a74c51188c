"""A worker's table in host memory, which peers read one-sided: it need not step, or be awake."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from logging import Logger
from math import inf
from mmap import mmap
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from kvpatch.geometry.tensor_facts import Memory
from kvpatch.transfer.nixl import Ends, errors_of, prepare_read
from kvpatch.worker.state import worker_state

HOST_MEMORY = Memory("DRAM")
WORD_BYTES = 8
#: Between two polls that count.
PAUSE_SECONDS = 1e-3
#: A poll counts for no more than so many, however long the process was frozen before it.
_MOST_AT_ONCE = 10
#: An answer is waited for in a step of the engine's, or the load takes one more step.
_SPIN_SECONDS = 1e-4

_Table = TypeVar("_Table", bound="PeerTable")


class PeerTable:
    """Registered with the worker's agent for as long as that lives.

    Args:
        nixl: the agent, before the worker states what it has.

    Attributes:
        size_bytes: of it.
        landings: the places for what this worker reads of its peers' tables.

    Raises:
        Exception: NIXL's, where it cannot register host memory.
    """

    size_bytes: ClassVar[int]
    landings: ClassVar[range]

    def __init__(self, nixl: Any) -> None:
        # Pages of its own, which a fork shares: a copy on write would take them off the card's.
        self._bytes = np.frombuffer(mmap(-1, self.size_bytes), dtype=np.uint8)
        place = (self.address, self.size_bytes, HOST_MEMORY.device_id, "")
        nixl.register_memory(nixl.get_reg_descs([place], HOST_MEMORY.kind))
        self._free = deque(self.landings)

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data)

    def take_landing(self) -> int | None:
        """A place for what is read of a peer; None where all are taken."""
        return self._free.popleft() if self._free else None

    def give_back(self, landing: int) -> None:
        """Frees a place to which nothing is written any more."""
        self._free.append(landing)


def made_table(worker: Any, kind: type[_Table], log: Logger, lost: str) -> _Table | None:
    """A worker's new table of a kind; None where there is no host memory for it.

    Args:
        lost: what is not done then, for the log.
    """
    errors: tuple[type[Exception], ...] = RuntimeError, MemoryError
    errors += errors_of(worker.nixl_wrapper)
    try:
        table = kind(worker.nixl_wrapper)
    except errors as error:
        log.warning("%s: no host memory for it: %s", lost, error)
        return None
    worker_state(worker).hold(table)
    return table


class Patience:
    """How often an answer of a peer is polled for before it is given up; a pause apart or more.

    A poll of the engine's steps, which may be long, counts for several.
    """

    def __init__(self, most: int) -> None:
        self._left, self._last = most, -inf

    def is_over(self) -> bool:
        """Counts a poll that has brought nothing; True if none is left."""
        now = time.monotonic()
        pauses = 1.0 if self._last == -inf else (now - self._last) / PAUSE_SECONDS
        if pauses >= 1.0:
            self._left, self._last = self._left - int(min(pauses, _MOST_AT_ONCE)), now
        return self._left < 0


@dataclass(eq=False)
class TableRead(Generic[_Table]):
    """Reads what one rank of a peer has written down of a request.

    Args:
        table: this worker's own, where it lands.
        agent: the peer's rank, as NIXL calls it.
        remote_table: where the rank's table begins.
        generation: the word of the peer's hold.
        is_paced: whether a thread looks again soon, and not the next step alone.
    """

    table: _Table
    agent: str
    remote_table: int
    generation: int
    is_paced: bool = field(default=False, kw_only=True)
    _landing: int | None = field(default=None, init=False)
    _handle: Any = field(default=None, init=False)
    _next: float = field(default=0.0, init=False)
    _patience: Patience = field(init=False)

    def _post(self, nixl: Any, remote: int, local: int, size_bytes: int) -> Any:
        """Begins to read from one address to another; returns what NIXL says of it.

        In steps alone it is waited for, for a short time.
        """
        began = time.monotonic()
        self._handle = prepare_read(
            nixl,
            Ends(HOST_MEMORY, HOST_MEMORY, self.agent),
            np.array([remote], dtype=np.uint64),
            np.array([local], dtype=np.uint64),
            np.array([size_bytes]),
        )
        state = nixl.transfer(self._handle)
        while state == "PROC" and not self.is_paced and time.monotonic() - began < _SPIN_SECONDS:
            state = nixl.check_xfer_state(self._handle)
        return state

    def release(self, nixl: Any) -> None:
        """Lets go of what is on its way; what lands late is none that anybody believes.

        Raises:
            Exception: NIXL's, where it cannot be cancelled.
        """
        self._leave()
        self._let_go(nixl)

    def _leave(self) -> None:
        """Gives back the place where it lands, which is soon another read's."""
        landing, self._landing = self._landing, None
        if landing is not None:
            self.table.give_back(landing)

    def _let_go(self, nixl: Any) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            nixl.release_xfer_handle(handle)
