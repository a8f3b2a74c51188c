"""Ranks that share KV heads: more of them than the model has, where P and D have unlike numbers.

Some ranks then hold a head that their neighbours hold too. Releases refuse most of that, by
an assertion without a word. Reads of ours are planned by heads, so that it is enough that
the release prepares and books such a peer as if each rank had heads of its own: which bytes
a read moves is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpatch.connector.handshake.agent_metadata import Statement
    from kvpatch.connector.local.local_geometry import LocalGeometry


def shares_heads(ours: LocalGeometry, peer: Statement) -> bool:
    """Whether the release refuses a peer of unlike ranks for the heads that some share."""
    if peer.tp_size == ours.tp_size or not ours.has_heads:
        return False
    least = ours.total_heads if ours.shares_read.counts_one_head else ours.total_heads + 1
    if peer.tp_size > ours.tp_size:
        return peer.tp_size >= least
    if ours.tp_size <= ours.total_heads or ours.shares_read.reads_its_share:
        return False
    return peer.tp_size < least  # else the release takes both for holders of one head a rank


def heads_as_if_unshared(ours: LocalGeometry, peer: Statement) -> int | None:
    """A number of heads of which every rank has some of its own; None where they do already."""
    return 2 * lcm(ours.tp_size, peer.tp_size) if shares_heads(ours, peer) else None


@contextmanager
def heads_called(worker: Any, heads: int | None) -> Iterator[None]:
    """While inside, the worker takes its model for one of so many heads; None for its own."""
    topology = getattr(worker, "transfer_topo", None) or getattr(worker, "kv_topo", None)
    if heads is None or not hasattr(topology, "total_num_kv_heads"):  # <= 0.13
        yield
        return
    said = {"total_num_kv_heads": heads, "local_physical_heads": heads // worker.world_size}
    own = {name: getattr(topology, name) for name in said if hasattr(topology, name)}
    for name in own:
        setattr(topology, name, said[name])
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(topology, name, value)
