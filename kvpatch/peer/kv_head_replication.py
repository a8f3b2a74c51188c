"""KV-head replication: more ranks than KV heads, where P and D have different numbers of ranks.

Some ranks then hold a head that their neighbours hold too. Releases refuse most such pairs, by
an assertion without a word. Our reads are planned by heads. So the release is told that each rank
has heads of its own, and prepares and books such a peer; which bytes a read moves is decided
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm
from typing import TYPE_CHECKING, Any

from kvpatch.core.releases import ReleaseFacts

if TYPE_CHECKING:
    from kvpatch.peer.agent_metadata import AgentMetadata
    from kvpatch.worker.local_geometry import LocalGeometry


def has_replicated_heads(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """Whether the release refuses a peer of another TP size for the heads that some ranks share."""
    if peer.tp_size == ours.tp_size or not ours.has_heads:
        return False
    least = ours.total_heads if ours.facts.counts_one_head else ours.total_heads + 1
    if peer.tp_size > ours.tp_size:
        return peer.tp_size >= least
    if ours.tp_size <= ours.total_heads or ours.facts.reads_its_share:
        return False
    return peer.tp_size < least  # else the release takes both for holders of one head a rank


def heads_without_replication(ours: LocalGeometry, peer: AgentMetadata) -> int | None:
    """A number of heads of which every rank has some of its own; None where they do already."""
    return 2 * lcm(ours.tp_size, peer.tp_size) if has_replicated_heads(ours, peer) else None


@contextmanager
def model_of_heads(worker: Any, facts: ReleaseFacts, heads: int | None) -> Iterator[None]:
    """While inside, the worker takes its model for one of so many heads; None for its own."""
    if heads is None or not facts.topology:
        yield
        return
    topology = getattr(worker, facts.topology)
    own = {"total_num_kv_heads": topology.total_num_kv_heads}
    if facts.topology == "transfer_topo":
        own["local_physical_heads"] = topology.local_physical_heads
        topology.local_physical_heads = heads // worker.world_size
    topology.total_num_kv_heads = heads
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(topology, name, value)
