"""Reads that a release drives like one of NIXL's transfers, and what they count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpatch.transfer.nixl import errors_of

_LOG = logging.getLogger("kvpatch.unlike_engines")


class Fate:
    """The state of a read.

    It is an object of its own because every step asks it of every read. Of the attributes of a
    thousand reads, few are in the processor's cache.

    Attributes:
        outcome: ``DONE``, ``PROC`` or ``ERR``.
    """

    __slots__ = ("outcome",)

    def __init__(self) -> None:
        self.outcome = "PROC"


class OwnRead:
    """A read of one request in place of a transfer: started, polled for its state, released.

    Each step asks of each transfer whether it is one of these. That takes ten times as long of
    an abstract class, so this is a plain one.

    Attributes:
        owner: what it is read for; nothing here looks at it.
    """

    owner: object = None

    def start(self) -> str:
        raise NotImplementedError

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``; one that has ended stays as it is."""
        raise NotImplementedError

    def void(self) -> bool:
        """Ends it without placing anything more: its blocks may belong to another request.

        The peer is told when nothing is on the wire any more; what was not placed is never
        ``DONE``.

        Returns:
            False where it is done already.
        """
        raise NotImplementedError

    def telemetry(self) -> Any:
        """Returns NIXL's telemetry, summed up over all transfers that the read consisted of."""
        raise NotImplementedError

    def release(self) -> None:
        """Lets go of everything, finished or not; a second time does nothing.

        Raises:
            Exception: NIXL's, where what goes straight to its place cannot be cancelled.
        """
        raise NotImplementedError


@dataclass
class Telemetry:
    """The telemetry of a read, summed up over its transfers. Times in us.

    Attributes:
        way: the path that the bytes took; nothing here looks at it.
    """

    startTime: int = 0  # noqa: N815 - NIXL's own names
    postDuration: int = 0  # noqa: N815
    xferDuration: int = 0  # noqa: N815
    totalBytes: int = 0  # noqa: N815
    descCount: int = 0  # noqa: N815
    way: str = ""

    @property
    def is_of_nothing(self) -> bool:
        """True if it is of a read of no bytes, which is none that anybody counts."""
        return not self.descCount

    def add(self, one: Any) -> None:
        """Counts another transfer; of the starts the first stays."""
        self.startTime = min(self.startTime or one.startTime, one.startTime)
        self.postDuration += one.postDuration
        self.xferDuration += one.xferDuration
        self.totalBytes += one.totalBytes
        self.descCount += one.descCount


def sum_of(found: Iterable[Any]) -> Telemetry:
    total = Telemetry()
    for one in found:
        if one is not None:
            total.add(one)
            if isinstance(one, Telemetry):
                total.way = total.way or one.way
    return total


class Tally:
    """Counts the transfers of one read, as far as NIXL does."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self.total = Telemetry()
        #: NIXL's, where the release did not ask it to count.
        self._uncounted: Exception | None = None
        #: Whether NIXL has nothing to say, which a release takes from 0.32 on.
        self._is_silent = False
        #: An old NIXL has no counts at all.
        self._errors: tuple[type[Exception], ...] = (AttributeError, *errors_of(nixl))

    def count(self, handle: Any) -> None:
        """Counts a transfer that is done and not yet released."""
        if self._uncounted is not None or self._is_silent:
            return
        try:
            found = self._nixl.get_xfer_telemetry(handle)
            self._is_silent = found is None
            if found is not None:
                self.total.add(found)
        except self._errors as error:
            self._uncounted = error

    def telemetry(self) -> Telemetry | None:
        """The sums over all transfers so far; None where NIXL says none of one.

        Raises:
            Exception: NIXL's, where it does not count.
        """
        if self._uncounted is not None:
            raise self._uncounted
        return None if self._is_silent else self.total


class JoinedRead(OwnRead):
    """The reads of one request, one from each rank, each of which notifies its own rank.

    One that fails leaves the others going on: blocks may be handed out again when nothing
    is written to them any more.

    Args:
        agent: the NIXL agent that the reads use.
        reads: prepared, and not yet started.
        tell_others: tells the ranks of which nothing is read; called after the last byte.
    """

    def __init__(
        self, agent: Any, reads: Sequence[OwnRead], tell_others: Callable[[], None]
    ) -> None:
        self._errors = errors_of(agent)
        self._reads = reads
        self._tell_others = tell_others
        self._started: list[OwnRead] = []
        self._given_up: list[OwnRead] = []
        self._has_failed = self._is_told = self._is_released = False

    def start(self) -> str:
        """Starts all of them; raises NIXL's error, and lets go of all, if the first cannot be."""
        for read in self._reads:
            try:
                read.start()
            except self._errors:
                _LOG.warning("a read from one of several ranks failed", exc_info=True)
                self._has_failed = True
                if not self._started:
                    self.release()
                    raise
                break
            self._started.append(read)
        return "PROC"

    def state(self) -> str:
        states = [read.state() for read in self._started]
        if "PROC" in states:
            return "PROC"
        for read, state in zip(self._started, states, strict=True):
            if state != "DONE" and not self._has_failed and read not in self._given_up:
                _LOG.warning("a read from one of several ranks ended as %s", state)
                self._has_failed = True
        if self._has_failed:
            return "ERR"
        if not self._is_told:
            self._tell_others()
            self._is_told = True
        return "ERR" if self._given_up else "DONE"

    def void(self) -> bool:
        """Voids those of these reads that go on; False if none does."""
        # Whoever is asked for its state goes on by it, and places more.
        self._given_up += [read for read in self._started if read.void()]
        return bool(self._given_up)

    def telemetry(self) -> Telemetry:
        return sum_of(read.telemetry() for read in self._reads)

    def release(self) -> None:
        """Lets go of all of them, whichever cannot be cancelled."""
        if self._is_released:
            return
        self._is_released = True
        failed: Exception | None = None
        for read in self._reads:
            try:
                read.release()
            except self._errors as error:
                failed = error
        if failed is not None:
            raise failed
