"""Reads from several ranks of a peer, as one.

Looks to a release that knows one transfer a request like one: started, asked for its
state, measured, released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvpatch.transfer.nixl import errors_of
from kvpatch.transfer.own_read import OwnRead
from kvpatch.transfer.telemetry import Telemetry, sum_of

_LOG = logging.getLogger("kvpatch.unlike_engines")


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
        """Starts all of them.

        Raises:
            Exception: NIXL's, where nothing is on its way yet; all have been let go of.
        """
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
        """``DONE``, ``PROC`` or ``ERR``; one that has ended stays as it is."""
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
        """Lets go of all of them; a second time does nothing.

        Raises:
            Exception: NIXL's, where one cannot be cancelled; the others have been let go of.
        """
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
