"""A read in chunks, driven by whoever asks for its state.

Looks to a release like one transfer: started, asked for its state, measured, released.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpatch.core.errors import KvpatchError
from kvpatch.geometry import Chunk, Placement, Plan
from kvpatch.transfer.free_space import Space
from kvpatch.transfer.lifetime import Lifetime
from kvpatch.transfer.nixl import Ends, errors_of, prepare_read
from kvpatch.transfer.staging_pool import StagingPool, Turn

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.staging")

#: Where NIXL reads while it is asked to, an engine is kept from its next step for no longer.
_LONG_SECONDS = 5e-3

#: Many times what a transport goes on trying for after an error (UCX: 7 times, a second each).
_QUARANTINE_SECONDS = 120.0


class Placer(Protocol):
    """:class:`kvpatch.transfer.caches.Caches`, or what stands for it."""

    def place(self, staging: torch.Tensor, placements: tuple[Placement, ...]) -> Callable[[], bool]:
        """Copies what has landed; what is returned says whether it is done, or raises."""

    def settle(self) -> None:
        """Waits for every copy that has been asked for."""


@dataclass
class Telemetry:
    """What NIXL counts of a transfer, over all that a read consisted of. Times in us."""

    startTime: int = 0  # noqa: N815 - NIXL's own names
    postDuration: int = 0  # noqa: N815
    xferDuration: int = 0  # noqa: N815
    totalBytes: int = 0  # noqa: N815
    descCount: int = 0  # noqa: N815


def sum_of(found: Iterable[Any]) -> Telemetry:
    """What several transfers come to; of their starts the first."""
    total = Telemetry()
    for one in found:
        total.startTime = min(total.startTime or one.startTime, one.startTime)
        total.postDuration += one.postDuration
        total.xferDuration += one.xferDuration
        total.totalBytes += one.totalBytes
        total.descCount += one.descCount
    return total


class _Flight(NamedTuple):
    """A transfer on the wire; one without a chunk goes straight to its place."""

    handle: Any
    chunk: Chunk | None
    space: Space | None


class StagedRead:
    """One request's read from one rank of a peer.

    The peer is told by a notification of its own, once, when the last byte has been read.
    A read that fails goes on until all that it has on the wire is over: what NIXL was
    told to cancel may still be written.

    Args:
        direct: what goes straight to its place; may have no runs.
        chunks: what goes through the pool, made as it is needed.
        caches: where chunks are placed.
    """

    def __init__(
        self,
        nixl: Any,
        pool: StagingPool,
        caches: Placer,
        ends: Ends,
        notification: bytes,
        direct: Plan,
        chunks: Iterator[Chunk],
    ) -> None:
        self._nixl = nixl
        self._pool = pool
        self._caches = caches
        self._ends = ends
        self._notification = notification
        self._direct = direct
        self._chunks = chunks
        self._next: Chunk | None = None
        self._flights: list[_Flight] = []
        self._landed: list[_Flight] = []
        self._placing: list[tuple[Callable[[], bool], Space]] = []
        self._read: list[Any] = []
        #: While it waits for the pool.
        self._turn: Turn | None = None
        self._is_void = self._has_failed = self._is_told = self._is_done = False
        #: When the last look ended, and how long the last one took that found something.
        self._left = self._worked = 0.0
        #: NIXL's errors, a chunk that cannot be, no memory for the pool, a copy that cannot be.
        self._errors: tuple[type[Exception], ...] = (
            KvpatchError,
            RuntimeError,
            MemoryError,
            ValueError,
            IndexError,
            *errors_of(nixl),
        )
        #: Of whoever reads; nothing here looks at it.
        self.owner: object = None
        #: Of what is read; nothing is asked for after it.
        self.lifetime: Lifetime | None = None
        self._looked = time.monotonic()

    def start(self) -> str:
        """Posts what there is room for."""
        came = self._looked = time.monotonic()
        if self._is_late(0.0):
            self._expire()
            return "PROC"
        try:
            if len(self._direct):
                plan = self._direct
                runs = plan.remote_address, plan.local_address, plan.length
                self._launch(prepare_read(self._nixl, self._ends, *runs), None, None)
            self._next = next(self._chunks, None)
            self._post()
        except self._errors:
            self._fail()
        self._left = time.monotonic()
        self._worked = self._left - came
        return "PROC"

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``, after doing what can be done by now."""
        turn = self._turn
        if turn is not None and not turn.is_first and not self._flights and not self._placing:
            now = time.monotonic()
            gap, self._looked = now - self._looked, now
            if self.lifetime is None or gap <= self.lifetime.longest_gap:
                return "PROC"  # of thousands, in every step
            self._expire()
        if self._is_done:
            return "DONE"
        came = time.monotonic()
        if self._next is not None and self._is_late(came - self._looked):
            self._expire()  # all that is on the wire already is as good as a release's own read
        self._looked = came
        has_landed = False
        while self._land():
            if not has_landed and self._next is not None:
                self._pool.pace.looked(came - self._left, self._worked)
            has_landed = True
            while self._landed:
                self._place(self._landed.pop(0))
            self._give_back()
            self._post_more()
            if time.monotonic() - came > _LONG_SECONDS:
                break
        self._give_back()
        if not self._flights:
            self._post_more()
        self._left = time.monotonic()
        if has_landed:
            self._worked = self._left - came
        if self._flights or self._placing or self._next is not None:
            return "PROC"
        if self._has_failed:
            return "ERR"
        if not self._is_told:
            self._nixl.send_notif(self._ends.agent, notif_msg=self._notification)
            self._is_told = True
        if self._is_void:
            return "ERR"
        self._is_done = True
        return "DONE"

    def void(self) -> bool:
        """Ends it as soon as what is on the wire has landed, without placing any of it.

        For a request that was given up, whose blocks may belong to another one by now. The
        peer is told; but what was not placed is never ``DONE``.

        Returns:
            False where it is done already.
        """
        if self._is_done:
            return False
        self._is_void = True
        self._stop()
        if self._placing:
            self._caches.settle()
        return True

    def telemetry(self) -> Telemetry:
        """The sums over all transfers so far."""
        return sum_of(self._nixl.get_xfer_telemetry(handle) for handle in self._read)

    def release(self) -> None:
        """Lets go of everything, finished or not; a second time does nothing.

        What is still on the wire to the pool keeps its space until it is over. What goes
        straight to its place is cancelled, as a release's own transfers are.

        Raises:
            Exception: NIXL's, where that cannot be cancelled.
        """
        self._is_void = True
        self._stop()
        if self._placing:
            self._caches.settle()
        self._give_back()
        for space in [flight.space for flight in self._landed if flight.space is not None]:
            self._pool.give(space)
        self._landed.clear()
        for handle in self._read:
            self._nixl.release_xfer_handle(handle)
        self._read.clear()
        for flight in tuple(self._flights):
            if flight.space is None:
                self._nixl.release_xfer_handle(flight.handle)
            else:
                _LOG.debug("a read that was given up still holds %s of the pool", flight.space)
                self._pool.lose(flight.space, _Over(self._nixl, flight.handle))
            self._flights.remove(flight)

    def __del__(self) -> None:
        # A release that forgets a read must not keep its space from the others.
        if not sys.is_finalizing():
            self.release()

    def _stop(self) -> None:
        """No more chunks."""
        self._pool.leave(self)
        self._turn = None
        self._next, self._chunks = None, iter(())

    def _fail(self) -> None:
        """Books the error that is being handled."""
        _LOG.warning("a read from %s failed", self._ends.agent, exc_info=True)
        self._has_failed = True
        self._stop()

    def _is_late(self, gap: float) -> bool:
        return self.lifetime is not None and self.lifetime.is_over(gap)

    def _expire(self) -> None:
        """Fails, if it has not: the peer may have given its blocks to another request."""
        if not (self._has_failed or self._is_void):
            _LOG.warning(
                "a read from %s took so long that the peer may have let go of its blocks by now: "
                "nothing more of it is read. More KVPATCH_STAGING_BYTES keep reads from waiting",
                self._ends.agent,
            )
            self._has_failed = True
            self._stop()

    def _land(self) -> bool:
        """Takes what has arrived out of what is on the wire; whether anything has."""
        for flight in tuple(self._flights):
            try:
                state = self._nixl.check_xfer_state(flight.handle)
            except self._errors:
                self._fail()
                state = "ERR"
            if state == "PROC":
                continue
            self._flights.remove(flight)
            if state == "DONE":
                self._landed.append(flight)
            else:
                self._lose(flight, state)
            if state == "DONE" or flight.space is None:
                self._read.append(flight.handle)
        return bool(self._landed)

    def _lose(self, flight: _Flight, state: str) -> None:
        """Books a transfer that failed. NIXL's word for that is no word about its parts.

        It says so when one of them has failed, looks at none of the others again, and can
        stop none: what is on its way may still land. What goes straight to its place is
        the release's to judge, as its own transfers are.
        """
        if not self._has_failed:
            _LOG.warning("a read from %s ended as %s", self._ends.agent, state)
            self._has_failed = True
            self._stop()
        if flight.space is not None:
            self._pool.quarantine(flight.space, _Over(self._nixl, flight.handle, has_failed=True))
            _LOG.warning(
                "%d bytes of the staging pool, which a read from %s that failed may still write "
                "to, are not used for %d s; that is so of %d of its %d bytes",
                flight.space.end - flight.space.start,
                self._ends.agent,
                _QUARANTINE_SECONDS,
                self._pool.lost_bytes,
                self._pool.size_bytes,
            )

    def _place(self, flight: _Flight) -> None:
        if flight.chunk is None or flight.space is None:
            return
        if self._has_failed or self._is_void:
            self._pool.give(flight.space)
            return
        try:
            is_placed = self._caches.place(self._pool.memory(flight.space), flight.chunk.placements)
        except self._errors:
            self._fail()
            self._caches.settle()
            self._pool.give(flight.space)
        else:
            self._placing.append((is_placed, flight.space))

    def _give_back(self) -> None:
        for placing in tuple(self._placing):
            is_placed, space = placing
            try:
                is_over = is_placed()
            except self._errors:
                self._fail()
                is_over = True
            if is_over:
                self._placing.remove(placing)
                self._pool.give(space)

    def _post_more(self) -> None:
        if not self._has_failed:
            try:
                self._post()
            except self._errors:
                self._fail()

    def _post(self) -> None:
        while self._next is not None:
            on_wire = sum(flight.chunk is not None for flight in self._flights)
            if on_wire >= self._pool.chunks_on_wire:
                return
            space = self._pool.take(self, self._ends.agent, self._next.buffer_bytes)
            if space is None:
                self._turn = self._pool.turn(self)
                return
            self._turn = None
            try:
                landing = self._pool.memory(space).data_ptr()
                handle = prepare_read(
                    self._nixl,
                    self._ends,
                    self._next.remote_address,
                    landing + self._next.staging_offset,
                    self._next.length,
                )
            except self._errors:
                self._pool.give(space)
                raise
            self._launch(handle, self._next, space)
            self._next = next(self._chunks, None)
        self._pool.leave(self)

    def _launch(self, handle: Any, planned: Chunk | None, space: Space | None) -> None:
        self._flights.append(_Flight(handle, planned, space))
        self._nixl.transfer(handle)


class _Over:
    """Whether a transfer that nobody waits for is over; lets go of it then.

    One that has failed is taken to be over after a time, for NIXL does not tell.
    """

    def __init__(self, nixl: Any, handle: Any, *, has_failed: bool = False) -> None:
        self._nixl = nixl
        self._handle = handle
        self._until = time.monotonic() + _QUARANTINE_SECONDS if has_failed else None

    def __call__(self) -> bool:
        if self._handle is None:
            return True
        if self._until is None and not self._has_ended():
            return False
        if self._until is not None and time.monotonic() < self._until:
            return False
        handle, self._handle = self._handle, None
        try:
            self._nixl.release_xfer_handle(handle)
        except errors_of(self._nixl):
            _LOG.debug("a transfer that was given up could not be released", exc_info=True)
        return True

    def _has_ended(self) -> bool:
        """Whether it is; from a failure on a clock runs."""
        try:
            state = self._nixl.check_xfer_state(self._handle)
        except errors_of(self._nixl):
            _LOG.debug("a transfer that was given up has failed", exc_info=True)
            state = "ERR"
        if state not in ("PROC", "DONE"):
            self._until = time.monotonic() + _QUARANTINE_SECONDS
        return bool(state != "PROC")
