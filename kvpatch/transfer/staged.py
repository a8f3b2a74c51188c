"""A read in rounds, driven by whoever asks for its state.

Looks to a release like one transfer: started, asked for its state, measured, released.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpatch.geometry import Placement, Plan, Round
from kvpatch.transfer.nixl import Ends, errors_of, prepare_read
from kvpatch.transfer.pool import StagingPool
from kvpatch.transfer.room import Space

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.staging")

Place = Callable[["torch.Tensor", tuple[Placement, ...]], Callable[[], bool]]


@dataclass
class Telemetry:
    """What NIXL counts of a transfer, over all that a read consisted of. Times in us."""

    startTime: int = 0  # noqa: N815 - NIXL's own names
    postDuration: int = 0  # noqa: N815
    xferDuration: int = 0  # noqa: N815
    totalBytes: int = 0  # noqa: N815
    descCount: int = 0  # noqa: N815


class _Flight(NamedTuple):
    """A transfer on the wire; one without a round goes straight to its place."""

    handle: Any
    round: Round | None
    space: Space | None


class StagedRead:
    """One request's read from one rank of a peer.

    The peer is told by a notification of its own, once, when the last byte has been read.

    Args:
        direct: what goes straight to its place; may have no runs.
        rounds: what goes through the pool, made as it is needed.
        place: copies a round to its places; :meth:`kvpatch.transfer.caches.Caches.place`.
    """

    def __init__(
        self,
        nixl: Any,
        pool: StagingPool,
        place: Place,
        ends: Ends,
        notification: bytes,
        direct: Plan,
        rounds: Iterator[Round],
    ) -> None:
        self._nixl = nixl
        self._pool = pool
        self._place = place
        self._ends = ends
        self._notification = notification
        self._direct = direct
        self._rounds = rounds
        self._next: Round | None = None
        self._flights: list[_Flight] = []
        self._placing: list[tuple[Callable[[], bool], Space]] = []
        self._read: list[Any] = []
        self._is_done = False
        #: Of whoever reads; nothing here looks at it.
        self.request_id = ""

    def start(self) -> str:
        """Posts what there is room for."""
        if len(self._direct):
            handle = prepare_read(
                self._nixl,
                self._ends,
                self._direct.remote_address,
                self._direct.local_address,
                self._direct.length,
            )
            self._flights.append(_Flight(handle, None, None))
            self._nixl.transfer(handle)
        self._next = next(self._rounds, None)
        self._post()
        return "PROC"

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``, after doing what can be done by now."""
        if self._is_done:
            return "DONE"
        for flight in tuple(self._flights):
            state = self._nixl.check_xfer_state(flight.handle)
            if state == "PROC":
                continue
            if state != "DONE":
                return str(state)
            self._flights.remove(flight)
            self._read.append(flight.handle)
            if flight.round is not None and flight.space is not None:
                landed = self._pool.memory(flight.space)
                self._placing.append((self._place(landed, flight.round.placements), flight.space))
        self._give_back()
        self._post()
        if self._flights or self._placing or self._next is not None:
            return "PROC"
        self._nixl.send_notif(self._ends.agent, notif_msg=self._notification)
        self._is_done = True
        return "DONE"

    def void(self) -> None:
        """Ends it as soon as what is on the wire has landed, without placing any of it.

        For a request that was given up, whose blocks may belong to another one by now.
        """
        self._place = _place_nothing
        self._next, self._rounds = None, iter(())

    def telemetry(self) -> Telemetry:
        """The sums over all transfers so far."""
        total = Telemetry()
        for handle in self._read:
            found = self._nixl.get_xfer_telemetry(handle)
            total.startTime = min(total.startTime or found.startTime, found.startTime)
            total.postDuration += found.postDuration
            total.xferDuration += found.xferDuration
            total.totalBytes += found.totalBytes
            total.descCount += found.descCount
        return total

    def release(self) -> None:
        """Lets go of everything, finished or not; a second time does nothing.

        A transfer that cannot be cancelled may still write: its space stays taken until
        it is over.
        """
        self._pool.leave(self)
        self._next, self._rounds = None, iter(())
        for handle in self._read:
            self._nixl.release_xfer_handle(handle)
        self._read.clear()
        for flight in self._flights:
            over = _Release(self._nixl, flight.handle)
            if flight.space is None:
                over()
            elif over():
                self._pool.give(flight.space)
            else:
                _LOG.warning("a read that was given up still holds %s of the pool", flight.space)
                self._pool.lose(flight.space, over)
        self._flights.clear()
        for is_placed, space in self._placing:
            self._pool.lose(space, is_placed)
        self._placing.clear()

    def __del__(self) -> None:
        # A release that forgets a read must not keep its space from the others.
        if not sys.is_finalizing():
            self.release()

    def _give_back(self) -> None:
        still = []
        for is_placed, space in self._placing:
            if is_placed():
                self._pool.give(space)
            else:
                still.append((is_placed, space))
        self._placing = still

    def _post(self) -> None:
        while self._next is not None:
            space = self._pool.take(self, self._ends.agent, self._next.buffer_bytes)
            if space is None:
                return
            try:
                landing = self._pool.memory(space).data_ptr()
                handle = prepare_read(
                    self._nixl,
                    self._ends,
                    self._next.remote_address,
                    landing + self._next.staging_offset,
                    self._next.length,
                )
            except errors_of(self._nixl):
                self._pool.give(space)
                raise
            self._flights.append(_Flight(handle, self._next, space))
            self._nixl.transfer(handle)
            self._next = next(self._rounds, None)
        self._pool.leave(self)


def _place_nothing(staging: torch.Tensor, placements: tuple[Placement, ...]) -> Callable[[], bool]:
    return lambda: True


class _Release:
    """Releases one transfer, as often as it takes; says whether it is over."""

    def __init__(self, nixl: Any, handle: Any) -> None:
        self._nixl = nixl
        self._handle = handle

    def __call__(self) -> bool:
        if self._handle is None:
            return True
        try:
            self._nixl.release_xfer_handle(self._handle)
        except errors_of(self._nixl):
            return False
        self._handle = None
        return True


def no_runs() -> Plan:
    """A plan of nothing."""
    empty = np.empty(0, dtype=np.int64)
    return Plan(empty, empty, empty, empty, empty)
