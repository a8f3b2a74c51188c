"""Space of the staging pool that transfers which nobody waits for may still write to."""

from __future__ import annotations

import logging
import time
from typing import Any

from kvpatch.transfer.free_space import Space
from kvpatch.transfer.nixl import errors_of
from kvpatch.transfer.staging_pool import StagingPool

_LOG = logging.getLogger("kvpatch.staging")

#: Many times what a transport goes on trying for after an error (UCX: 7 times, a second each).
_QUARANTINE_SECONDS = 120.0


def lose(nixl: Any, handle: Any, pool: StagingPool, space: Space) -> None:
    """Keeps the space of a transfer that was given up until that is over."""
    _LOG.debug("a read that was given up still holds %s of the pool", space)
    pool.lose(space, _Over(nixl, handle))


def quarantine(nixl: Any, handle: Any, pool: StagingPool, space: Space, agent: str) -> None:
    """Keeps the space of a transfer that failed for a time: NIXL does not say when it is over.

    Args:
        agent: the peer that was read from.
    """
    pool.quarantine(space, _Over(nixl, handle, has_failed=True))
    _LOG.warning(
        "%d bytes of the staging pool, which a read from %s that failed may still write "
        "to, are not used for %d s; that is so of %d of its %d bytes",
        space.end - space.start,
        agent,
        _QUARANTINE_SECONDS,
        pool.lost_bytes,
        pool.size_bytes,
    )


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
