"""What D tells a P of another release of its reads, in P's words."""

from __future__ import annotations

from typing import Any

from kvpatch.core.releases import FACTS
from kvpatch.peer.unlike_releases.peer_releases import PeerReleases
from kvpatch.transfer.lifetime import HEARTBEAT
from kvpatch.worker.state import held_by


def to_engine(worker: Any, engine_id: str, message: bytes) -> bytes | None:
    """A message to one of a peer's ranks; None for one that it would not understand.

    With as many ranks on both sides one of ours reads one of P's, which every release takes for
    all that it waits for.
    """
    known = held_by(worker, PeerReleases)
    statement = None if known is None else known.speaks_otherwise(engine_id)
    if statement is None:
        return message
    if message.startswith(HEARTBEAT):
        grants = any(FACTS[name].grants_leases for name in statement.releases)
        return message if grants else None
    request, colon, _ = message.rpartition(b":")
    return request + colon + b"1" if colon else message


def to_agent(worker: Any, agent: str, message: bytes) -> bytes | None:
    """The same, where NIXL's name of the rank alone is known."""
    known = held_by(worker, PeerReleases)
    if known is None or not known.has_others:
        return message
    for engine_id, ranks in tuple(worker._remote_agents.items()):  # handshakes add to it
        if agent in ranks.values():
            return to_engine(worker, engine_id, message)
    return message
