"""A worker's tables in host memory, which peers read one-sided: it need not step, or be awake.

The table of holds has a word for each hold on its blocks. A peer that has read a request's blocks
reads the word of its hold after them. The worker takes the word out before it says that the blocks
may be given away, so that a word that still stands there proves of every byte that was read before
it that it was read in time. Nobody waits for this worker: it may be in a long step, or in none.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import Logger
from math import inf
from mmap import mmap
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.plane import Memory
from kvpatch.transfer.nixl import Ends, errors_of, prepare_read
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

HOST_MEMORY = Memory("DRAM")
WORD_BYTES = 8
#: Between two polls that count.
PAUSE_SECONDS = 1e-3
#: A poll counts for no more than so many, however long the process was frozen before it.
_MOST_AT_ONCE = 10
#: An answer is waited for in a step of the engine's, or the load takes one more step: each one for
#: so long, and all of a step.
_SPIN_SECONDS = 1e-4
_SPIN_SECONDS_OF_STEP = 3e-4

_Table = TypeVar("_Table", bound="PeerTable")


class StepBudget:
    """The time for which reads of one worker's tables may hold the engine's thread in one step.

    Reads are of one step that begin shortly after one another.
    """

    def __init__(self) -> None:
        self._end = self._last = -inf

    def deadline(self) -> float:
        """Returns until when a read that begins now may be waited for."""
        now = time.monotonic()
        if now - self._last > PAUSE_SECONDS:
            self._end = now + _SPIN_SECONDS_OF_STEP
        self._last = now
        return min(self._end, now + _SPIN_SECONDS)


class PeerTable:
    """Registered with the worker's agent for as long as that lives.

    Args:
        nixl: the agent, before the worker states what it has.
        backends: of the agent, those that the release registers its caches with; none for all.

    Attributes:
        landing_start: where the places begin for what this worker reads of its peers' tables.
        landings, landing_bytes: how many there are, and the size of each.
        budget: for what this worker reads in steps alone, of all of its tables.

    Raises:
        Exception: NIXL's, where it cannot register host memory.
    """

    landing_start: ClassVar[int]
    landings: ClassVar[int]
    landing_bytes: ClassVar[int]

    def __init__(self, nixl: Any, backends: Sequence[str] = ()) -> None:
        # Pages of its own, which a fork shares: a copy on write would take them off the card's.
        self._bytes = np.frombuffer(mmap(-1, self.size_bytes()), dtype=np.uint8)
        place = (self.address, self.size_bytes(), HOST_MEMORY.device_id, "")
        memory = nixl.get_reg_descs([place], HOST_MEMORY.kind)
        nixl.register_memory(memory, backends=list(backends))
        self._free = deque(range(self.landings))
        self.budget = StepBudget()

    @classmethod
    def size_bytes(cls) -> int:
        return cls.landing_start + cls.landings * cls.landing_bytes

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data)

    def take_landing(self) -> int | None:
        """A place for what is read of a peer; None where all are taken."""
        return self._free.popleft() if self._free else None

    def give_back(self, landing: int) -> None:
        """Frees a place to which nothing is written any more."""
        self._free.append(landing)

    def address_of(self, landing: int) -> int:
        return self.address + self.landing_start + landing * self.landing_bytes

    def landed(self, landing: int, size_bytes: int) -> bytes:
        start = self.landing_start + landing * self.landing_bytes
        return self._bytes[start : start + size_bytes].tobytes()


def made_table(release: ReleaseWorker, kind: type[_Table], log: Logger, lost: str) -> _Table | None:
    """A worker's new table of a kind; None where there is no host memory for it.

    Args:
        lost: what is not done then, for the log.
    """
    worker = release.worker
    errors: tuple[type[Exception], ...] = RuntimeError, MemoryError
    errors += errors_of(worker.nixl_wrapper)
    try:
        table = kind(worker.nixl_wrapper, release.nixl_backends)
    except errors as error:
        log.warning("%s: no host memory for it: %s", lost, error)
        return None
    state = worker_state(worker)
    table.budget = state.of(StepBudget)
    state.hold(table)
    return table


class Patience:
    """The number of polls for a peer's answer before the reader gives up; a pause apart or more.

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

    def _read(self, nixl: Any, remote: int, size_bytes: int) -> bytes | None:
        """Returns bytes of the peer's table; None until they are here.

        Raises:
            PeerRefused: NIXL could not read them.
            Exception: NIXL's.
        """
        if self._handle is None:
            if time.monotonic() < self._next:
                return None
            if self._landing is None:
                self._landing = self.table.take_landing()
            if self._landing is None:
                return None
            state = self._post(nixl, remote, self.table.address_of(self._landing), size_bytes)
        else:
            state = nixl.check_xfer_state(self._handle)
        if state == "PROC" or self._landing is None:
            return None
        self._let_go(nixl)
        if state != "DONE":
            raise PeerRefused(
                f"a table of {self.agent} could not be read: {state}",
                "see whether P is alive and can be reached from here, and send the request again",
            )
        return self.table.landed(self._landing, size_bytes)

    def _post(self, nixl: Any, remote: int, local: int, size_bytes: int) -> Any:
        """Begins to read from one address to another; returns what NIXL says of it.

        In steps alone it is waited for, for a short time.
        """
        deadline = -inf if self.is_paced else self.table.budget.deadline()
        self._handle = prepare_read(
            nixl,
            Ends(HOST_MEMORY, HOST_MEMORY, self.agent),
            np.array([remote], dtype=np.uint64),
            np.array([local], dtype=np.uint64),
            np.array([size_bytes]),
        )
        state = nixl.transfer(self._handle)
        while state == "PROC" and not self.is_paced:
            state = nixl.check_xfer_state(self._handle)
            if time.monotonic() >= deadline:
                break
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


_LEAST_PAGE_BYTES = 4096
#: Of a process's memory, where it does not ask for more: 47 on x86-64, 48 on ARM.
_ADDRESS_BITS = 48
#: Requests whose blocks are held at the same time; a later one takes the place of the first.
_SLOTS = 1 << 16
#: Loads in a row of which a peer's word could not be read, before it is hardly asked any more.
MOST_MISSED = 3

_COUNT_BITS = 31
_ENDED = 1


def generation_of(start: int, count: int) -> int:
    """The word of an engine's hold: never 0, and never that of another start of the engine.

    Args:
        start: 32 random bits of this start.
        count: of the holds since.
    """
    return start << 32 | (count & ((1 << _COUNT_BITS) - 1)) << 1


def is_still_to_come(found: int, generation: int) -> bool:
    """True if a worker may not have heard of a hold yet, by what stands in its place."""
    if found == 0:
        return True
    is_of_this_start = found >> 32 == generation >> 32
    return is_of_this_start and found >> 1 < generation >> 1


class HoldTable(PeerTable):
    """The table of one worker's holds, with room for the words of peers that it reads."""

    landing_start = _SLOTS * WORD_BYTES
    landings = 1 << 12
    landing_bytes = WORD_BYTES

    def __init__(self, nixl: Any, backends: Sequence[str] = ()) -> None:
        super().__init__(nixl, backends)
        self._words = self._bytes.view(np.uint64)
        #: By request, of this worker's own.
        self._held: dict[str, int] = {}
        #: Loads in a row of which the data could be read and the word could not, by NIXL's name of
        #: the rank and the place of its table.
        self.missed: Counter[tuple[str, int]] = Counter()

    def hold(self, request_id: str, generation: int) -> None:
        """Writes a hold down, in place of an earlier one of the same request."""
        self.end(request_id)
        self._held[request_id] = generation
        self._words[_slot(generation)] = generation

    def hear(self, changes: Mapping[str, int]) -> None:
        """Writes down what the scheduler has granted and withdrawn."""
        for request_id, generation in changes.items():
            if generation:
                self.hold(request_id, generation)
            else:
                self.end(request_id)

    def is_held(self, request_id: str, generation: int) -> bool:
        """True if a hold's word has not been taken out; for any thread."""
        return self._held.get(request_id) == generation

    def end(self, request_id: str) -> None:
        """Takes a request's word out: its blocks may be given away when this returns."""
        generation = self._held.pop(request_id, None)
        if generation is not None and int(self._words[_slot(generation)]) == generation:
            self._words[_slot(generation)] = generation | _ENDED

    def end_all(self) -> None:
        """Takes all words out: what the blocks hold is about to be lost."""
        for request_id in tuple(self._held):
            self.end(request_id)


def may_be_table(address: int) -> bool:
    """True of an address where a peer can have a table; of one with a wrong mask hardly ever is.

    A table begins with a page, in the part of the memory that Linux gives to processes.
    """
    return address % _LEAST_PAGE_BYTES == 0 and 0 < address < 1 << _ADDRESS_BITS


def word_address(table: int, generation: int) -> int:
    """Returns the address of a hold's word in a peer's table that begins at an address."""
    return table + _slot(generation) * WORD_BYTES


def _slot(generation: int) -> int:
    return (generation >> 1) % _SLOTS
