"""How long what is to be read stays where it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from kvpatch.transfer.digest_check import DigestCheck
from kvpatch.transfer.hold_check import HoldCheck


class Verdict(Enum):
    """On a peer's blocks, by the end of a read."""

    HELD = auto()  # the peer has said so after the last byte
    GONE = auto()  # it has said that it has let go of them
    EXPIRED = auto()  # nobody is asked, and it may have
    WRONG = auto()  # it held them, and what was read is something else


@dataclass(eq=False)
class Lifetime:
    """Of a peer's blocks, as far as the side that reads them can tell.

    Attributes:
        ends: when the peer may give them to another request; as ``time.time`` counts.
        longest_gap: seconds between two looks at the read after which the peer may have given
            them away, since its lease is renewed as often as is looked.
        check: asks the peer; None where it has no kvpatch, or cannot be asked. With it nothing has
            to be guessed.
        verdict: what the read has found out; None where it knows nothing, or not yet.
        digest: compares what was read; None where the peer promises no digest.
        fail_check: called if a check fails the read; on whatever thread.
    """

    ends: float = inf
    longest_gap: float = inf
    check: HoldCheck | None = None
    verdict: Verdict | None = None
    digest: DigestCheck | None = None
    fail_check: Callable[[], None] | None = None

    def is_over(self, gap: float) -> bool:
        """Whether they may hold another request's tokens by now.

        Args:
            gap: seconds since the last look.
        """
        return gap > self.longest_gap or time.time() > self.ends
