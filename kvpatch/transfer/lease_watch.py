"""Whether a peer still has what is read, by its lease and by how often this engine looked."""

from __future__ import annotations

import time
from math import inf

from kvpatch.transfer.digest_check import DigestCheck
from kvpatch.transfer.hold_check import HoldCheck
from kvpatch.transfer.lifetime import Lifetime, Verdict
from kvpatch.transfer.looks import Looks


class LeaseWatch:
    """One read's.

    Attributes:
        lifetime: of what is read; nothing is asked for after it. None where nobody knows it.
        looks: the engine's.
    """

    def __init__(self) -> None:
        self.lifetime: Lifetime | None = None
        self.looks = Looks()
        #: How many of the engine's absences there were before.
        self._absences = 0

    def admit(self) -> None:
        """The engine is here, and may begin the read."""
        self.looks.book()
        if self.lifetime is not None:
            self.looks.allow(self.lifetime.longest_gap)
        self._absences = self.looks.absences

    @property
    def _guessed(self) -> Lifetime | None:
        """The lifetime where the lease alone tells of it; None where the peer is asked."""
        return None if self.check is not None else self.lifetime

    @property
    def was_away(self) -> bool:
        """Whether the engine did not look for longer than the peer's lease allows."""
        if self._guessed is None or self._guessed.longest_gap == inf:
            return False
        return self.looks.absences != self._absences

    @property
    def is_late(self) -> bool:
        """Whether the peer may have given its blocks to another request by now."""
        gap = time.monotonic() - self.looks.at
        return self.was_away or (self._guessed is not None and self._guessed.is_over(gap))

    @property
    def must_wait(self) -> bool:
        """Whether the engine has not looked for so long that a post might land after the lease."""
        if self._guessed is None:
            return False
        gap = time.monotonic() - self.looks.at
        return self.was_away or gap > self._guessed.longest_gap / 2

    @property
    def check(self) -> HoldCheck | None:
        """What asks the peer; None where nothing does."""
        return None if self.lifetime is None else self.lifetime.check

    @property
    def digest(self) -> DigestCheck | None:
        """What compares what was read; None where nothing does."""
        return None if self.lifetime is None else self.lifetime.digest

    def find(self, verdict: Verdict) -> None:
        """Books what the read has found out."""
        if self.lifetime is not None:
            self.lifetime.verdict = verdict
            if verdict is not Verdict.HELD and self.lifetime.fail_check is not None:
                self.lifetime.fail_check()
