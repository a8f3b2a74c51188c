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
        agent: takes staged reads for NIXL's own transfers.
        reads: prepared, and not yet started.
        tell_others: tells the ranks of which nothing is read; called after the last byte.
    """

    def __init__(self, agent: Any, reads: Sequence[Any], tell_others: Callable[[], None]) -> None:
        self._agent = agent
        self._reads = list(reads)
        self._tell_others = tell_others
        self._going: list[Any] = []
        self._given_up: list[OwnRead] = []
        self._has_failed = self._is_told = self._is_done = False
        self._errors: tuple[type[Exception], ...] = errors_of(agent)

    def start(self) -> str:
        """Starts all of them.

        Raises:
            Exception: NIXL's, where nothing is on its way yet; all have been let go of.
        """
        for read in self._reads:
            try:
                self._agent.transfer(read)
            except self._errors:
                self._fail()
                if not self._going:
                    self.release()
                    raise
                break
            self._going.append(read)
        return "PROC"

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``; one that has ended stays as it is."""
        if self._is_done:
            return "DONE"
        for read in tuple(self._going):
            try:
                state = self._agent.check_xfer_state(read)
            except self._errors:
                self._fail()
                state = "ERR"
            if state == "PROC":
                continue
            self._going.remove(read)
            if state != "DONE" and not self._has_failed and read not in self._given_up:
                _LOG.warning("a read from one of several ranks ended as %s", state)
                self._has_failed = True
        if self._going:
            return "PROC"
        if self._has_failed:
            return "ERR"
        if not self._is_told:
            self._tell_others()
            self._is_told = True
        if self._given_up:
            return "ERR"
        self._is_done = True
        return "DONE"

    def void(self) -> bool:
        """Voids those of these reads that go on; False if none does."""
        self._given_up += [r for r in self._going if isinstance(r, OwnRead) and r.void()]
        return bool(self._given_up)

    def telemetry(self) -> Telemetry:
        return sum_of(self._agent.get_xfer_telemetry(read) for read in self._reads)

    def release(self) -> None:
        """Lets go of all of them; a second time does nothing.

        Raises:
            Exception: NIXL's, where one cannot be cancelled; the others have been let go of.
        """
        reads, self._reads = self._reads, []
        failed: Exception | None = None
        for read in reads:
            try:
                self._agent.release_xfer_handle(read)
            except self._errors as error:
                failed = error
        if failed is not None:
            raise failed

    def _fail(self) -> None:
        """Books the error that is being handled."""
        _LOG.warning("a read from one of several ranks failed", exc_info=True)
        self._has_failed = True
