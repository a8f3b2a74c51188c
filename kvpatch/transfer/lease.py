"""The time for which a peer keeps blocks that are read, and the checks of a read of them.

The rule: a read that ends after P's lease must have run out counts as failed by a check. P may have
given the blocks to another request by then, and says nothing of it. D counts the lease on its own
clock, from when it was given the request. P had finished its prefill before that, so that P's own
lease ends earlier. Where P grants a hold its word decides, and no clock is looked at.

================  =================================================  ===========================
P's release       P keeps the blocks of what it has computed         D extends that
================  =================================================  ===========================
``<= 0.21``       ``VLLM_NIXL_ABORT_REQUEST_TIMEOUT`` seconds        never
from 0.22 on      ``kv_lease_duration`` seconds                      with each heartbeat, by two
                                                                     thirds of it
================  =================================================  ===========================

From 0.22 on a P that reads an earlier turn back from D has ``decoder_kv_blocks_ttl`` seconds, and
no heartbeats. From 0.26 on D's answer states when these are over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from kvpatch.core.recent_engines import RecentRanks
from kvpatch.core.releases import FACTS
from kvpatch.core.text import shown
from kvpatch.observe.catalogue import CheckResult
from kvpatch.transfer.nixl import errors_of

if TYPE_CHECKING:
    from kvpatch.geometry.plane import HeadName
    from kvpatch.observe.book import ComparedRead

_LOG = logging.getLogger("kvpatch.stale_blocks")

#: What vLLM's heartbeats begin with.
HEARTBEAT = b"HB:"


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
    """The lease that P grants for the blocks of one request.

    Attributes:
        granted: when it ends without heartbeats, as ``time.monotonic`` counts; never by default.
        heartbeats: the heartbeats that extend it; None where none do.
    """

    granted: float = inf
    heartbeats: Heartbeats | None = None

    @property
    def end(self) -> float:
        """When the lease is over, by what is known now."""
        return self.granted if self.heartbeats is None else self.heartbeats.extended(self.granted)


@dataclass(frozen=True)
class Leases:
    """The leases that one worker's peers grant.

    Attributes:
        seconds: that P keeps blocks for, from when its request is finished.
        extension: seconds that each heartbeat of D adds; None where D sends none.
        read_back_seconds: the same as `seconds`, of a D from which P reads an earlier turn.
    """

    seconds: float = inf
    extension: float | None = None
    read_back_seconds: float = inf
    _heartbeats: RecentRanks[Heartbeats] = field(
        default_factory=RecentRanks, compare=False, repr=False
    )

    def at(self, releases: Sequence[str]) -> Leases:
        """Returns those of a P of another release, which may be any of these; none for D's own.

        How such a P is configured is not known, and is taken for the release's default.
        """
        if all(FACTS[name].grants_leases == (self.extension is not None) for name in releases):
            return self
        seconds = min(FACTS[name].blocks_kept_seconds for name in releases)
        return replace(self, seconds=float(seconds), extension=None)

    def beat(self, agent: str, now: float) -> None:
        """Records a heartbeat that was sent to a peer's rank, as NIXL calls it."""
        if self.extension is not None:
            self._sent_to(agent, self.extension).send(now)

    def lease(self, agent: str, arrived: float | None, *, is_read_back: bool = False) -> Lease:
        """Returns the lease of the blocks of a request; without an end if nobody knows more.

        Args:
            agent: the peer's rank, as NIXL calls it.
            arrived: when D was given the request.
        """
        if arrived is None:
            return Lease()
        if is_read_back:
            return Lease(arrived + self.read_back_seconds)
        ends = arrived + self.seconds
        if self.extension is None:
            return Lease(ends)
        return Lease(ends, self._sent_to(agent, self.extension))

    def _sent_to(self, agent: str, extension: float) -> Heartbeats:
        found = self._heartbeats.used(agent)
        if found is None:
            found = self._heartbeats[agent] = Heartbeats(extension)
        return found


class Check(Protocol):
    """An instrument on one read from one rank of a peer.

    The read asks its checks in order, after its last byte has landed.

    Attributes:
        proves_hold: True if it asks whether the peer still has the blocks. Then its word decides in
            place of the lease, and its time is a part of the read's.
    """

    proves_hold: bool

    @property
    def is_due(self) -> bool:
        """True if it is asked before the read begins, too."""

    def ask(self, nixl: Any, *, has_begun: bool) -> CheckResult | None:
        """Returns what it says; None until it is known. The call after an answer asks anew.

        It logs why a read fails. ``UNPROVEN`` takes it out of the read, which goes by the lease.

        Args:
            nixl: the agent, as the thread may use it that calls this.
            has_begun: whether data have been asked for.
        """

    def release(self, nixl: Any) -> None:
        """Lets go of what is on its way; a second time does nothing.

        Raises:
            Exception: NIXL's, where it cannot be cancelled.
        """


@dataclass(eq=False)
class Lifetime:
    """The state of the blocks that one read of a rank reads, as far as D knows it.

    Attributes:
        agent, number: NIXL's name of the rank, and P's number of it.
        mask: hides the rank's addresses in P's answers; None where it is not known.
        checks: the checks that are still to be asked, in order.
        verdict: the result that the read has found; None where there is none, or not yet.
        compared: what a digest says of the read; None where nothing is compared with one.
        fail_check: called on any thread if a check fails the read.
        is_paced: whether a thread drives the read, and not the next step alone.
        taken: heads that come from other ranks, and are not compared with what this one has;
            None where the release reads, which may fill some from several.
        is_idle: whether nothing is read, so that nobody minds what the rank holds.
    """

    lease: Lease = field(default_factory=Lease)
    request_id: str = ""
    agent: str = ""
    number: int = 0
    mask: int | None = None
    checks: tuple[Check, ...] = ()
    verdict: CheckResult | None = None
    compared: ComparedRead | None = None
    fail_check: Callable[[], None] | None = None
    is_paced: bool = False
    taken: frozenset[HeadName] | None = None
    is_idle: bool = False
    _is_held: bool = field(default=False, init=False)

    @property
    def has_failed(self) -> bool:
        """True if a check, or the lease, has failed the read."""
        return self.verdict in (CheckResult.GONE, CheckResult.WRONG, CheckResult.EXPIRED)

    def may_begin(self, nixl: Any) -> bool:
        """Asks the checks that are due before; False if one keeps the read waiting, or fails it.

        Raises:
            Exception: a check's own; the read fails.
        """
        for check in self.checks:
            if check.is_due and self._ask(check, nixl, has_begun=False) is None:
                return False
            if self.has_failed:
                return False
        return True

    def ask(self, nixl: Any, landed: float) -> bool:
        """Asks the checks that are left; True once all have answered.

        Args:
            landed: when the last byte had, as ``time.monotonic`` counts.

        Raises:
            Exception: a check's own; the read fails.
        """
        while self.checks:
            check = self.checks[0]
            result = self._ask(check, nixl, has_begun=True, landed=landed)
            if result is None:
                return False
            if self.has_failed:
                return True
            self._is_held |= check.proves_hold and result is CheckResult.HELD
            self._drop(check)
        return True

    def _ask(
        self, check: Check, nixl: Any, *, has_begun: bool, landed: float | None = None
    ) -> CheckResult | None:
        result = check.ask(nixl, has_begun=has_begun)
        if result in (CheckResult.GONE, CheckResult.WRONG):
            self._find(result)
        elif result is CheckResult.UNPROVEN:
            self._drop(check)
            if check.proves_hold:
                self.expire(time.monotonic() if landed is None else landed)
        return result

    def _find(self, verdict: CheckResult) -> None:
        self.verdict = verdict
        if verdict is not CheckResult.HELD and self.fail_check is not None:
            self.fail_check()

    def _drop(self, check: Check) -> None:
        self.checks = tuple(one for one in self.checks if one is not check)

    def end(self, nixl: Any, *, is_well: bool = False) -> None:
        """Lets go of what the checks have on its way; a second time does nothing."""
        if is_well and self._is_held:
            self._find(CheckResult.HELD)
        for check in self.checks:
            try:
                check.release(nixl)
            except errors_of(nixl):
                _LOG.warning("what a check reads could not be released", exc_info=True)

    def expire(self, when: float) -> None:
        """Fails the read if P's lease was over then; where P is asked its word decides."""
        late_by = when - self.lease.end
        if late_by <= 0 or self.has_failed or any(check.proves_hold for check in self.checks):
            return
        _LOG.warning(
            "request %s: its read from %s was not over %.1f s after P's lease must have run out: "
            "P may have given its blocks to another request, and the load counts as failed. A "
            "longer kv_lease_duration on both sides (VLLM_NIXL_ABORT_REQUEST_TIMEOUT <= 0.21) "
            "waits for slower readers; more KVPATCH_STAGING_BYTES keep reads from waiting",
            shown(self.request_id),
            shown(self.agent),
            late_by,
        )
        self._find(CheckResult.EXPIRED)
