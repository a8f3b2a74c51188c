"""When an engine looks at its reads, and how often at what does not come."""

from __future__ import annotations

import time
from math import inf

#: Between two polls that count.
PAUSE_SECONDS = 1e-3


class Looks:
    """One worker's. A step asks the clock once, however many reads it looks at.

    Attributes:
        step: a read that is asked for the second time in one begins the next.
        at: when the engine's last step began to look, as ``time.monotonic`` counts.
        absences: how often the engine did not look for longer than a peer's lease allows.
    """

    def __init__(self) -> None:
        self.step = 0
        self.at = time.monotonic()
        self.absences = 0
        self._longest_gap = inf

    def allow(self, seconds: float) -> None:
        """Books a lease that allows for no longer absence; the shortest holds for all reads."""
        self._longest_gap = min(self._longest_gap, seconds)

    def begin_step(self) -> None:
        """The engine looks at its reads anew."""
        self.step += 1
        self.book()

    def book(self) -> None:
        """The engine is here."""
        now = time.monotonic()
        # In this order: whoever finds the new time finds the absence before it too.
        if now - self.at > self._longest_gap:
            self.absences += 1
        self.at = now


class Patience:
    """The polls, a pause apart or more, that are left for one answer.

    However long a process was frozen, the first poll behind that is one poll.
    """

    def __init__(self, most: int) -> None:
        self._left, self._next = most, 0.0

    def is_over(self) -> bool:
        """Books a poll that has brought nothing; True if none is left."""
        now = time.monotonic()
        if now >= self._next:
            self._left, self._next = self._left - 1, now + PAUSE_SECONDS
        return self._left < 0
