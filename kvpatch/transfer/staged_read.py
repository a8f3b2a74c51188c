"""A read of many transfers: chunks through the staging pool, and runs straight to their places.

It goes on when it is told to: by the progress thread (``progress_thread``), or, without one, by
whoever asks for its state. To a release it looks like one transfer.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

from kvpatch.core.errors import NothingToRead
from kvpatch.geometry.direct_plan import Plan
from kvpatch.geometry.segments import Int64Array
from kvpatch.geometry.staged_plan import Chunk
from kvpatch.observe.catalogue import CheckResult
from kvpatch.transfer.lease import Lifetime
from kvpatch.transfer.nixl import READ_ERRORS, Ends, errors_of, prepare_read, tell_over
from kvpatch.transfer.own_read import Fate, OwnRead, Tally, Telemetry
from kvpatch.transfer.plane_bytes import Tails
from kvpatch.transfer.staging_pool import Space, StagingPool, Turn, lose
from kvpatch.transfer.storageless import AnyCaches

_LOG = logging.getLogger("kvpatch.staging")

#: Where NIXL reads while it is asked to, an engine is kept from its next step for no longer.
_LONG_SECONDS = 5e-3

#: Of one read's posts that go straight to their places, which are all asked for.
_MOST_DIRECT_FLIGHTS = 8
#: Of one post, so that the engine's own calls of NIXL wait for few.
_MOST_DIRECT_BYTES = 32 * 1024**2
_MOST_RUNS = 8192
#: NIXL spreads a post of so many over the threads that a release asks it for, and reads a smaller
#: one in the thread that posts, where the transport reads by itself (shared memory does).
SPREAD_RUNS = 1024


class _Flight(NamedTuple):
    """A transfer on the wire; one without a chunk goes straight to its place."""

    handle: Any
    chunk: Chunk | None
    space: Space | None


class _Stage(Enum):
    """The stage of a read. One that is given up may fail too; no stage leads back."""

    NEW = auto()
    GOING = auto()
    GIVEN_UP = auto()
    FAILED = auto()


class StagedRead(OwnRead):
    """The read of one request from one rank of a peer.

    The peer is told by a notification of its own, once, when the last byte has been read.
    A read that fails goes on until all that it has on the wire is over: what NIXL was
    told to cancel may still be written.

    Args:
        caches: where chunks are placed.
        direct: runs that go straight to their places; made as they are needed.
        chunks: parts that go through the staging pool; made as they are needed.
    """

    def __init__(
        self,
        nixl: Any,
        pool: StagingPool,
        caches: AnyCaches,
        ends: Ends,
        notification: bytes,
        direct: Iterable[Plan],
        chunks: Iterator[Chunk],
    ) -> None:
        self._nixl = nixl
        self._pool = pool
        self._ends = ends
        self._notification = notification
        self._direct, self._chunks = iter(direct), chunks
        #: What is posted next; None before it begins, and where nothing is left.
        self._runs: Plan | None = None
        self._chunk: Chunk | None = None
        self._flights: list[_Flight] = []
        self._failed_handles: list[Any] = []
        self._tally = Tally(nixl)
        #: From its first request for space until it needs no more.
        self._turn: Turn | None = None
        self._stage = _Stage.NEW
        self._is_timed = False
        self.fate = Fate()
        self._errors = (*READ_ERRORS, *errors_of(nixl))
        self._caches = caches
        #: Copies that are not over, and where they are made from.
        self._copies: list[tuple[Callable[[], bool], Space | None]] = []
        #: All copies come after the device work that was queued when it was admitted.
        self._after: Any = None
        self.lifetime = Lifetime()
        #: Of another read of the request, where there is nothing to read here: the peer is told
        #: once that one is over.
        self.idle_until: Fate | None = None
        #: What is zeroed beside it, once it has begun.
        self.tails: Callable[[], Tails] | None = None
        #: When the first transfer was posted, and when the last one was found done.
        self._began: float | None = None
        self._landed_at: float | None = None

    def start(self) -> str:
        self.admit()
        self._begin()
        self.state()
        return "PROC"

    def admit(self) -> None:
        """Records what the device was told before; on the engine's thread."""
        self._after = self._caches.mark()

    def _begin(self) -> None:
        """Plans what is posted first."""
        self._stage = _Stage.GOING
        if self._is_failed_by_lease():
            return
        try:
            if self.tails is not None:
                self._copies.append((self._caches.zero(self.tails(), self._after), None))
            self._next_runs()
            self._chunk = next(self._chunks, None)
            if not (self._is_any_left or self.idle_until is not None):
                raise NothingToRead(f"a read from {self._ends.agent} with no bytes in it")
        except self._errors:
            self._fail()

    @property
    def outcome(self) -> str:
        return self.fate.outcome

    def settle(self) -> None:
        if self._copies:
            self._caches.settle()

    @property
    def may_register(self) -> bool:
        """True if its next post may have the pool made, which registers memory."""
        return self._chunk is not None and not self._pool.is_made

    @property
    def holds_nothing(self) -> bool:
        """True if it is over, and nothing of it is left to be released."""
        return self.outcome == "DONE" or (self.outcome == "ERR" and not self._failed_handles)

    @property
    def is_queued(self) -> bool:
        """True if it can only wait for reads of the same peer that have asked before it."""
        turn = self._turn
        return turn is not None and not (turn.is_first or self._flights or self._copies)

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``, after doing what can be done by now."""
        if self.outcome == "DONE" or self.is_queued:
            return self.outcome  # of thousands, in every step
        came = time.monotonic()
        while self.advance() and time.monotonic() - came < _LONG_SECONDS:
            pass
        return self.outcome

    def advance(self) -> bool:
        """Does what can be done now, with one post at most; False if there was nothing."""
        if self.outcome != "PROC":
            return False
        if self._stage is _Stage.NEW:
            self._begin()
            return True  # what it is about to post is known from now on
        if self._waits_for_another:
            return False
        has_landed = self._land()
        is_first = self._is_any_left and self._began is None
        if is_first and not self._may_begin() and self._goes_on:
            return False
        has_placed = self._give_back()
        has_posted = self._post_more()
        self._conclude()
        return has_landed or has_placed or has_posted

    def void(self) -> bool:
        """Ends it as soon as what is on the wire has landed, without placing any of it."""
        if self.outcome == "DONE":
            return False
        self._give_up()
        return True

    def telemetry(self) -> Telemetry | None:
        return self._tally.telemetry()

    def release(self) -> None:
        """Lets go of everything, finished or not; a second time does nothing.

        What is still on the wire to the pool keeps its space until it is over. What goes
        straight to its place is cancelled, as a release's own transfers are.
        """
        self._give_up()
        self._give_back()
        self.lifetime.end(self._nixl)
        while self._failed_handles:  # vLLM tries again where one cannot be (from 0.30)
            self._nixl.release_xfer_handle(self._failed_handles[-1])
            self._failed_handles.pop()
        for flight in tuple(self._flights):
            if flight.space is None:
                self._nixl.release_xfer_handle(flight.handle)
            else:
                lose(self._nixl, flight.handle, self._pool, flight.space)
            self._flights.remove(flight)
        self._end_untold()

    def let_go(self) -> None:
        """Does :meth:`release` for a read that no step polls any more; logs NIXL's errors."""
        try:
            self.release()
        except errors_of(self._nixl):
            _LOG.warning("a read that nobody asks for could not be released", exc_info=True)
            self._end_untold()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A release that forgets a read must not keep its space from the others.
        if not is_finalizing():
            self.let_go()

    def _end_untold(self) -> None:
        if self.outcome == "PROC":
            self.fate.outcome = "ERR"

    def _give_up(self) -> None:
        if self._stage is not _Stage.FAILED:
            self._stage = _Stage.GIVEN_UP
        self._stop()
        if self._copies:
            self._caches.give_up(is_placed for is_placed, _ in self._copies)

    def _stop(self) -> None:
        self._leave()
        self._direct, self._chunks = iter(()), iter(())
        self._runs = self._chunk = None

    def _leave(self) -> None:
        if self._turn is not None:
            self._pool.leave(self._turn)
        self._turn = None

    @property
    def _is_any_left(self) -> bool:
        return self._runs is not None or self._chunk is not None

    def _next_runs(self) -> None:
        self._runs = next((plan for plan in self._direct if len(plan)), None)

    def _fail(self) -> None:
        """Books the error that is being handled."""
        _LOG.warning("a read from %s failed", self._ends.agent, exc_info=True)
        self._end_failed()

    def _end_failed(self) -> None:
        self._stage = _Stage.FAILED
        self._stop()

    def _is_failed_by_lease(self) -> bool:
        """Fails it if the peer's lease was over when something landed last; True if it has.

        Of a read that has something to post: if it is over now.
        """
        if self._goes_on:
            landed = None if self._is_any_left else self._landed_at
            self.lifetime.expire(time.monotonic() if landed is None else landed)
        return self._is_failed_by_check()

    def _is_failed_by_check(self) -> bool:
        if self.lifetime.has_failed:
            self._end_failed()
        return self.lifetime.has_failed

    def _conclude(self) -> None:
        """Tells the peer and books the outcome, once there is nothing left to wait for."""
        if self._flights or self._copies or self._is_any_left or self.outcome != "PROC":
            return
        if self._waits_for_another:
            return
        if self._began is not None and not self._is_timed:  # several are on the wire together
            self._tally.total.xferDuration = round(1e6 * (time.monotonic() - self._began))
        self._is_timed = True
        if self._goes_on and not self._ask():
            return
        # Of wrong bytes too: the peer need not hold what nobody will read again.
        is_told = self._stage is not _Stage.FAILED or self.lifetime.verdict is CheckResult.WRONG
        if is_told:  # one that is gone cannot be, and its bytes are here
            tell_over(self._nixl, [self._ends.agent], self._notification)
        self.fate.outcome = "DONE" if self._goes_on else "ERR"
        self.lifetime.end(self._nixl, is_well=self._goes_on)

    @property
    def _goes_on(self) -> bool:
        """True if it has neither failed nor been given up."""
        return self._stage in (_Stage.NEW, _Stage.GOING)

    @property
    def _waits_for_another(self) -> bool:
        """True if it has nothing to read, and the read that has is not over."""
        until = self.idle_until
        return until is not None and until.outcome == "PROC" and self._goes_on

    def _may_begin(self) -> bool:
        """True if no check that is due before the start keeps it waiting, or fails it."""
        try:
            return self.lifetime.may_begin(self._nixl) and not self._is_failed_by_check()
        except self._errors:
            self._fail()
            return False

    def _ask(self) -> bool:
        """Asks the checks that are left; True once all have answered."""
        landed = time.monotonic() if self._landed_at is None else self._landed_at
        try:
            has_answered = self.lifetime.ask(self._nixl, landed)
        except self._errors:
            self._fail()
            return True
        self._is_failed_by_check()
        return has_answered

    def _land(self) -> bool:
        """Takes what has arrived off the wire, and has it placed; True if anything has."""
        landed = []
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
                self._landed_at = time.monotonic()
                landed.append(flight)
                self._tally.count(flight.handle)
                try:
                    self._nixl.release_xfer_handle(flight.handle)
                except errors_of(self._nixl):
                    _LOG.warning("a transfer that is done could not be released", exc_info=True)
            else:
                self._lose(flight, state)
        if landed or self._is_any_left:
            self._is_failed_by_lease()
        for flight in landed:
            self._place(flight)
        return bool(landed)

    def _lose(self, flight: _Flight, state: str) -> None:
        """Books a transfer of which a part has failed: NIXL stops no other, so that some may land.

        What goes straight to its place is the release's to judge, as its own transfers are.
        """
        if self._stage is not _Stage.FAILED:
            _LOG.warning("a read from %s ended as %s", self._ends.agent, state)
            self._end_failed()
        if flight.space is None:
            self._failed_handles.append(flight.handle)
        else:
            lose(self._nixl, flight.handle, self._pool, flight.space, self._ends.agent)

    def _place(self, flight: _Flight) -> None:
        if flight.chunk is None or flight.space is None:
            return
        if not self._goes_on:
            self._pool.give(flight.space)
            return
        try:
            memory = self._pool.memory(flight.space)
            is_placed = self._caches.place(memory, flight.chunk.placements, self._after)
        except self._errors:
            self._fail()
            try:
                self._caches.settle()  # some copies of the placement may be under way
            except self._errors:  # of a device that has failed, and copies nothing any more
                _LOG.debug("copies could not be waited for", exc_info=True)
            self._pool.give(flight.space)
        else:
            self._copies.append((is_placed, flight.space))

    def _give_back(self) -> bool:
        """Frees the space of what has been placed; True if there was any."""
        before = len(self._copies)
        for is_placed, space in tuple(self._copies):
            try:
                if not is_placed():
                    continue
            except self._errors:
                self._fail()
            self._copies.remove((is_placed, space))
            if space is not None:
                self._pool.give(space)
        return len(self._copies) < before

    def _post_more(self) -> bool:
        """Posts one transfer, if there is room for it; whether there was."""
        if not self._is_any_left:
            return False
        try:
            has_posted = self._post_chunk() if self._runs is None else self._post_runs(self._runs)
            if has_posted and self._chunk is None:
                self._leave()
        except self._errors:
            self._fail()
            return False
        return has_posted

    def _post_runs(self, runs: Plan) -> bool:
        """Posts runs that go straight to their places, where few are on the wire.

        They wait for what the device was told before the read began. With async scheduling a step
        may still be queued that writes a token into blocks which were freed after it was launched:
        it would write over what the read has brought.
        """
        if self._after is not None and not self._after.query():
            return False
        if len(self._flights) >= _MOST_DIRECT_FLIGHTS:
            return False
        count = runs_of_a_post(runs.length, is_spread=self._pool.has_threads)
        part = runs.part(0, count)
        handle = prepare_read(
            self._nixl, self._ends, part.remote_address, part.local_address, part.length
        )
        is_over = self._launch(handle, None, None) == "DONE"
        if is_over and int(part.length.sum()) > _MOST_DIRECT_BYTES:
            self._pool.has_threads = False  # this thread has read all of it, in NIXL's agent
        if count < len(runs):
            self._runs = runs.part(count, len(runs))
        else:
            self._next_runs()
        return True

    def _post_chunk(self) -> bool:
        """Posts the next chunk, where there is room for it; whether there was."""
        chunk = self._chunk
        if chunk is None:
            return False
        on_wire = sum(flight.chunk is not None for flight in self._flights)
        if on_wire >= self._pool.chunks_on_wire:
            return False
        peer = self._ends.engine or self._ends.agent  # whose ranks hang together
        if self._turn is None:
            self._turn = self._pool.line_up(id(self), peer)
        space = self._pool.take(self._turn, chunk.buffer_bytes)
        if space is None:
            return False
        try:
            places = self._pool.memory(space).data_ptr() + chunk.staging_offset
            handle = prepare_read(
                self._nixl, self._ends, chunk.remote_address, places, chunk.length
            )
        except self._errors:
            self._pool.give(space)
            raise
        self._launch(handle, chunk, space)
        self._chunk = next(self._chunks, None)
        return True

    def _launch(self, handle: Any, planned: Chunk | None, space: Space | None) -> Any:
        self._flights.append(_Flight(handle, planned, space))
        self._began = self._began or time.monotonic()
        return self._nixl.transfer(handle)


def runs_of_a_post(length: Int64Array, *, is_spread: bool) -> int:
    """Counts the first runs that one post takes, of so many bytes each; one at least.

    They come to ``_MOST_DIRECT_BYTES`` at most, or up to four times as many where that makes them
    enough to be spread.

    Args:
        is_spread: True if NIXL has threads to spread them over.
    """
    ends = np.cumsum(length[:_MOST_RUNS])
    most = np.array([_MOST_DIRECT_BYTES, 4 * _MOST_DIRECT_BYTES])
    count, more = np.searchsorted(ends, most, side="right").tolist()
    if is_spread and count < SPREAD_RUNS <= more:
        count = SPREAD_RUNS
    return max(1, int(count))
