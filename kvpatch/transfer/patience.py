"""How often an answer of a peer is polled for before it is given up."""

from __future__ import annotations

import time

#: Between two polls that count.
PAUSE_SECONDS = 1e-3


class Patience:
    """The polls, a pause apart or more, that are left for one answer.

    However long a process was frozen, the first poll behind that is one poll.
    """

    def __init__(self, most: int) -> None:
        self._left, self._next = most, 0.0

    def is_over(self) -> bool:
        """Counts a poll that has brought nothing; True if none is left."""
        now = time.monotonic()
        if now >= self._next:
            self._left, self._next = self._left - 1, now + PAUSE_SECONDS
        return self._left < 0
