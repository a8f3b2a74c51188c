"""A transfer that vLLM posts, polls and releases, with kvpatch's checks where it is found done."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from kvpatch.observe.catalogue import CheckResult
from kvpatch.transfer.lease import Lifetime
from kvpatch.transfer.nixl import READ_ERRORS, errors_of, tell_over
from kvpatch.transfer.own_read import OwnRead

_LOG = logging.getLogger("kvpatch.stale_blocks")


class CheckedTransfer(OwnRead):
    """A transfer of vLLM's own, from a peer like this engine.

    It is ``DONE`` once NIXL has found it done, all checks have passed and P has been notified.
    A check that needs an answer of P's is asked again with each of vLLM's polls. Where P is not
    asked, a transfer that ends after P's lease fails.

    Args:
        handle: NIXL's, prepared without a notification where there are checks.
        agent: the peer's rank, as NIXL calls it.
        lifetime: of the peer's blocks.
        notification: for P, once all checks have passed; empty where vLLM notifies P itself.
    """

    def __init__(
        self, nixl: Any, handle: Any, agent: str, lifetime: Lifetime, notification: bytes = b""
    ) -> None:
        self._nixl = nixl
        self._handle = handle
        self._agent = agent
        self._notification = notification if lifetime.checks else b""
        self.lifetime = lifetime
        self._state = "PROC"
        self._has_begun = False
        #: When a poll found it done.
        self._landed: float | None = None
        self._telemetry: Any = None
        self._errors = (*READ_ERRORS, *errors_of(nixl))

    def start(self) -> str:
        """Posts it, unless a check has to pass before; raises NIXL's error where it cannot."""
        try:
            self._begin()
        except self._errors:
            if self._has_begun:
                self._end("ERR")
                raise
            self._fail()  # a check's own
        return "PROC"

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``, after asking the checks that are due.

        Between the last two polls nobody knows when it ended. A lease that ended between them
        counts as over.
        """
        if self._state == "PROC":
            try:
                if self._has_begun:
                    self._poll()
                else:
                    self._begin()
            except self._errors:
                self._fail()
        return self._state

    def void(self) -> bool:
        """Does nothing: vLLM's own transfer ends as it would without kvpatch."""
        return False

    def telemetry(self) -> Any:
        """Returns NIXL's telemetry of the data alone."""
        if self._telemetry is None and self._handle is not None:
            self._telemetry = self._nixl.get_xfer_telemetry(self._handle)
        return self._telemetry

    def release(self) -> None:
        """Releases the transfer; a second call does nothing, but after an error (vLLM retries)."""
        if self._state == "PROC":  # it is not done now, whatever NIXL says of it later
            self._leave()
        if self._handle is not None:
            self._nixl.release_xfer_handle(self._handle)
        self._handle = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # <= 0.13 vLLM forgets a request's other transfers where one has failed.
        if self._state == "PROC" and not is_finalizing():
            self._leave()

    def _leave(self) -> None:
        """Ends it where vLLM has failed the request by another rank's transfer, or given it up.

        P is notified if nothing reads its blocks any more, as NIXL itself does without checks.
        """
        try:
            if self._landed is not None or (
                self._has_begun and self._nixl.check_xfer_state(self._handle) == "DONE"
            ):
                self._notify()
        except self._errors:
            _LOG.debug("%s is not notified of a read that is given up", self._agent, exc_info=True)
        self._end("ERR")

    def _begin(self) -> None:
        if self.lifetime.may_begin(self._nixl):
            self._has_begun = True
            self._nixl.transfer(self._handle)
        elif self.lifetime.has_failed:
            self._end("ERR")

    def _poll(self) -> None:
        if self._landed is None:
            found = str(self._nixl.check_xfer_state(self._handle))
            if found == "PROC":
                return
            if found != "DONE":
                self._end(found)
                return
            self._landed = time.monotonic()
            self.lifetime.expire(self._landed)
        if not (self.lifetime.has_failed or self.lifetime.ask(self._nixl, self._landed)):
            return
        # Of wrong bytes too: P need not hold what nobody will read again.
        if not self.lifetime.has_failed or self.lifetime.verdict is CheckResult.WRONG:
            self._notify()
        self._end("ERR" if self.lifetime.has_failed else "DONE")

    def _notify(self) -> None:
        """Notifies P, as far as it can be: its bytes are here if it is gone, too."""
        tell_over(self._nixl, [self._agent], self._notification)

    def _fail(self) -> None:
        """Books the error that is being handled."""
        _LOG.warning("a read from %s failed", self._agent, exc_info=True)
        self._end("ERR")

    def _end(self, state: str) -> None:
        self._state = state
        self.lifetime.end(self._nixl, is_well=state == "DONE")
