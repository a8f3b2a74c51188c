"""Says in the log how much of the host buffer is in use, now and then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from kvpatch.connector.host_buffer.host_block_table import HostBlockTable

_LOG = logging.getLogger("kvpatch.host_buffer")
#: As often as vLLM says how many requests are running.
_EVERY_SECONDS = 10.0


class UsageLog:
    """One line while host blocks are in use, at most every so many seconds, and one when none is.

    The last line is therefore true of an engine at rest.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._next = clock() + _EVERY_SECONDS
        self._is_said = False

    def look(self, table: HostBlockTable) -> None:
        """To be called whenever host blocks may have changed hands."""
        is_used = bool(table.reserved or table.waiting)
        if is_used:
            now = self._clock()
            if now < self._next:
                return
            self._next = now + _EVERY_SECONDS
        elif not self._is_said:
            return
        self._is_said = is_used
        _LOG.info(
            "host buffer: %d of %d blocks reserved, %d of them filled; %d requests wait for blocks",
            table.reserved,
            table.size,
            table.held,
            table.waiting,
        )
