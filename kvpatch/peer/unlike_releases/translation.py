"""The metadata of a P of another release, in the words of our release and in our vocabulary."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.layout_strides import LAYER_BY_LAYER, inner_layout, layer_by_layer
from kvpatch.peer.agent_metadata import AgentMetadata, read_agent_metadata
from kvpatch.peer.unlike_releases.peer_releases import Statement


def translated(statement: Statement, own: ReleaseFacts, backend: str) -> dict[str, Any]:
    """The fields that a worker of our release would state of the same memory.

    What P does not say is what our release takes for nothing said, or our own side's: what is
    decided of the peer is decided by its own words.

    Args:
        backend: ours.
    """
    stated = statement.fields
    found = {name: stated[name] for name in own.agent_metadata & stated.keys()}
    without = {
        "block_strides": stated["block_lens"],
        "attn_backend_name": backend,
        "ssm_sizes": (0, 0),
        "physical_blocks_per_logical_kv_block": 1,
        "dcp_size": 1,
        "pcp_size": 1,
    }
    found |= {n: v for n, v in without.items() if n in own.agent_metadata and n not in found}
    found["kv_cache_layout"] = layout_as(stated.get("kv_cache_layout"), own)
    return found


def layout_as(layout: Any, own: ReleaseFacts) -> Any:
    """A layout by the name that our release has for it; its own where there is none."""
    inner = inner_layout(layout) if isinstance(layout, str) else None
    if inner is None or layout not in LAYER_BY_LAYER:
        return layout
    return layer_by_layer(inner, like="LBHNC" if own.names_layouts else "HND")


def read_statement(
    statement: Statement, own: ReleaseFacts, tp_rank: int, tp_size: int
) -> AgentMetadata:
    """What a rank of another release states, in our vocabulary.

    Raises:
        PeerRefused: it states what cannot be true.
    """
    stated = SimpleNamespace(**statement.fields)
    peer = read_agent_metadata(stated, statement.facts, tp_rank, tp_size)
    return replace(peer, layout=layout_as(peer.layout, own), releases=statement.releases)
