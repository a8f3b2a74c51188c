"""How long a peer keeps the blocks that are read, and how a read fails that ends after that.

The rule: a read that ends after P's lease must have run out counts as failed by a check. P may have
given the blocks to another request by then, and says nothing of it. D counts the lease on its own
clock, from when it was given the request. P had finished its prefill before that, so that P's own
lease ends earlier. Where P grants a hold its word decides, and no clock is looked at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Any

from kvpatch.checks.digests.digest_check import DigestCheck
from kvpatch.checks.holds.hold_check import HoldCheck
from kvpatch.transfer.own_read import OwnRead

_LOG = logging.getLogger("kvpatch.stale_blocks")


class Verdict(Enum):
    """On a peer's blocks, by the end of a read."""

    HELD = auto()  # the peer has said so after the last byte
    GONE = auto()  # it has said that it has let go of them
    EXPIRED = auto()  # nobody is asked, and its lease was over before the last byte
    WRONG = auto()  # it held them, and what was read is something else


class Heartbeats:
    """The heartbeats that D has sent to one rank of P, each of which extends P's leases there.

    One of them extends only a lease that has not run out yet. So the last run of heartbeats is all
    that counts: no lease outlasts a gap that is longer than an extension, but one that is new.

    Args:
        extension: seconds that P grants, from when it gets a heartbeat.
    """

    def __init__(self, extension: float) -> None:
        self._extension = extension
        #: The first and the last of the run; replaced at once, since another thread reads it.
        self._run = inf, -inf

    def send(self, now: float) -> None:
        """Records one, as ``time.monotonic`` counts."""
        first, last = self._run
        self._run = (first if now <= last + self._extension else now), now

    def extended(self, end: float) -> float:
        """Returns when a lease ends that would have ended then without heartbeats."""
        first, last = self._run
        return max(end, last + self._extension) if first <= end else end


@dataclass(frozen=True)
class Lease:
    """P's, of the blocks of one request.

    Attributes:
        granted: when it ends without heartbeats, as ``time.monotonic`` counts; never by default.
        heartbeats: that extend it; None where none does.
    """

    granted: float = inf
    heartbeats: Heartbeats | None = None

    @property
    def end(self) -> float:
        """When it is over, by what is known now."""
        return self.granted if self.heartbeats is None else self.heartbeats.extended(self.granted)


@dataclass(eq=False)
class Lifetime:
    """What D knows of the blocks that one read reads.

    Attributes:
        lease: of the blocks.
        request_id: whose they are, for the log.
        check: asks the peer; None where it has no kvpatch, or cannot be asked.
        verdict: what the read has found out; None where it knows nothing, or not yet.
        digest: compares what was read; None where the peer promises no digest.
        fail_check: called if a check fails the read; on whatever thread.
    """

    lease: Lease = field(default_factory=Lease)
    request_id: str = ""
    check: HoldCheck | None = None
    verdict: Verdict | None = None
    digest: DigestCheck | None = None
    fail_check: Callable[[], None] | None = None

    def find(self, verdict: Verdict) -> None:
        """Records what the read has found out."""
        self.verdict = verdict
        if verdict is not Verdict.HELD and self.fail_check is not None:
            self.fail_check()

    def late_by(self, when: float) -> float:
        """Returns for how many seconds the lease was over then; 0 while it lasted.

        It never is over where the peer's word is asked for.
        """
        return 0.0 if self.check is not None else max(0.0, when - self.lease.end)

    def expire(self, agent: str, late_by: float) -> None:
        """Records that the lease was over before the read was.

        Args:
            agent: the peer's rank, as NIXL calls it.
        """
        _LOG.warning(
            "request %s: its read from %s was not over %.1f s after P's lease must have run out: "
            "P may have given its blocks to another request, and the load counts as failed. A "
            "longer kv_lease_duration on both sides (VLLM_NIXL_ABORT_REQUEST_TIMEOUT <= 0.21) "
            "waits for slower readers; more KVPATCH_STAGING_BYTES keep reads from waiting",
            self.request_id,
            agent,
            late_by,
        )
        self.find(Verdict.EXPIRED)


class LeasedTransfer(OwnRead):
    """A transfer of vLLM's own, which fails if it ends after the peer's lease.

    Args:
        handle: NIXL's.
        agent: the peer's rank, as NIXL calls it.
    """

    def __init__(self, nixl: Any, handle: Any, agent: str, lifetime: Lifetime) -> None:
        self._nixl = nixl
        self._handle = handle
        self._agent = agent
        self.lifetime = lifetime
        self._state = "PROC"

    def start(self) -> str:
        """As NIXL's own."""
        return str(self._nixl.transfer(self._handle))

    def state(self) -> str:
        """NIXL's word; ``ERR`` for a transfer that is found done after the lease.

        Between the last two polls nobody knows when it ended. A lease that ended between them
        counts as over.
        """
        if self._state == "PROC":
            found = str(self._nixl.check_xfer_state(self._handle))
            late_by = self.lifetime.late_by(time.monotonic()) if found == "DONE" else 0.0
            if late_by:
                self.lifetime.expire(self._agent, late_by)
            self._state = "ERR" if late_by else found
        return self._state

    def void(self) -> bool:
        """Nothing: vLLM's own transfer ends as it would without kvpatch."""
        return False

    def telemetry(self) -> Any:
        """As NIXL's own."""
        return self._nixl.get_xfer_telemetry(self._handle)

    def release(self) -> None:
        """As NIXL's own; a second time does nothing, but behind an error (vLLM tries again)."""
        if self._handle is not None:
            self._nixl.release_xfer_handle(self._handle)
        self._handle = None
