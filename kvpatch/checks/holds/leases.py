"""How long the peers of a worker keep what D has not read yet, by D's own configuration.

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

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from kvpatch.core.recent_engines import RecentEngines
from kvpatch.core.releases import FACTS, ReleaseFacts
from kvpatch.transfer.lifetime import Heartbeats, Lease

#: What vLLM's heartbeats begin with.
HEARTBEAT = b"HB:"
_EXPIRY = "remote_blocks_expiry_time"
#: vLLM's own default of ``decoder_kv_blocks_ttl``.
_READ_BACK_SECONDS = 480


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
    _heartbeats: RecentEngines[Heartbeats] = field(
        default_factory=RecentEngines, compare=False, repr=False
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
        found = self._heartbeats.get(agent)
        if found is None:
            found = self._heartbeats[agent] = Heartbeats(extension)
        return found


def leases_of(worker: Any, facts: ReleaseFacts) -> Leases:
    """Returns what the worker's release and configuration say."""
    if facts.grants_leases:
        configured = worker.vllm_config.kv_transfer_config.get_from_extra_config
        return Leases(
            _seconds(lambda: configured("kv_lease_duration", facts.blocks_kept_seconds)),
            _seconds(lambda: worker._lease_extension),
            _seconds(lambda: configured("decoder_kv_blocks_ttl", _READ_BACK_SECONDS)),
        )
    import vllm.envs

    seconds = _seconds(lambda: vllm.envs.VLLM_NIXL_ABORT_REQUEST_TIMEOUT)
    return Leases(seconds, read_back_seconds=seconds)


def _seconds(read: Callable[[], Any]) -> float:
    """Returns a setting; without end where it is none: a D looks at no setting of P's."""
    try:
        return float(read())
    except (TypeError, ValueError, OverflowError):
        return inf


def stated_end(worker: Any, engine_id: str, entry: Any, facts: ReleaseFacts) -> float | None:
    """Returns when the peer has said that its blocks expire, as ``time.monotonic`` counts.

    The peer counts on its own clock, and the handshake has told how far that is from D's.
    None where nobody says so.

    Args:
        entry: the request's, in the connector's metadata.
    """
    if _EXPIRY not in facts.params:
        return None
    stated, offset = entry.remote.blocks_expiry_time, worker._engine_clock_offset.get(engine_id)
    if not isinstance(stated, int | float) or offset is None:
        return None
    return time.monotonic() + float(stated) - float(offset) - time.perf_counter()
