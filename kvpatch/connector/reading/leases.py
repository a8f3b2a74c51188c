"""How long P keeps what D has not read yet, as far as D can know.

On releases <= 0.21 P lets go of a request's blocks a fixed time after it was computed
(``VLLM_NIXL_ABORT_REQUEST_TIMEOUT``, which is to be the same on both sides), and D is told
neither when that was nor how long it is. From 0.22 on P grants a lease, and D's scheduler
renews the leases of all requests that are not received yet in some of its steps. In each
step D's worker looks at its reads too: one that was not looked at for long is one whose
lease was not renewed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from kvpatch.core.releases import FACTS, ReleaseFacts
from kvpatch.transfer.lifetime import Lifetime

#: Of the fixed time. The rest is for what lies between P's answer and its arrival at D.
_SHARE = 0.95
#: D renews every sixth of a lease, by two thirds of it: half of it may pass without a step.
_GAP_OF_EXTENSION = 0.75
#: Of a lease that D's release does not know of, from when the request came to D.
_SHARE_UNRENEWED = 0.5


@dataclass(frozen=True)
class Leases:
    """What a worker knows of its peers' patience.

    Attributes:
        seconds: that P keeps blocks for, from when its request is finished.
        gap_seconds: that D's steps may be apart.
    """

    seconds: float = inf
    gap_seconds: float = inf

    def at(self, releases: Sequence[str]) -> Leases:
        """The same of a P of another release, which may be any of these; none where it is ours.

        What it was configured with is not known, and is taken for the release's default.
        """
        leases = [_kept(name) for name in releases if FACTS[name].grants_leases]
        fixed = [_kept(name) for name in releases if not FACTS[name].grants_leases]
        found = self
        if leases and self.gap_seconds == inf:  # nobody here renews them
            found = replace(found, seconds=min(self.seconds, _SHARE_UNRENEWED * min(leases)))
        if fixed and self.seconds == inf:
            found = replace(found, seconds=_SHARE * min(fixed))
        return found

    def lifetime(self, arrived: float | None) -> Lifetime:
        """The lifetime of the blocks of a request that came in then."""
        ends = inf if arrived is None else arrived + self.seconds
        return Lifetime(ends, self.gap_seconds)


def _kept(release: str) -> float:
    return float(FACTS[release].blocks_kept_seconds)


def leases_of(worker: Any, facts: ReleaseFacts) -> Leases:
    """As the worker's release has them."""
    if facts.grants_leases:
        return Leases(gap_seconds=_GAP_OF_EXTENSION * worker._lease_extension)
    import vllm.envs

    return Leases(_SHARE * vllm.envs.VLLM_NIXL_ABORT_REQUEST_TIMEOUT)
