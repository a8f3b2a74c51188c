"""The planes of one of our layers as they lie at a peer."""

from __future__ import annotations

from collections.abc import Sequence

from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import Axes, DenseBlocks, row_bytes
from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import BlockShape, heads_of
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.registered_caches import LayerCache


def peer_memory(ours: LocalGeometry, peer: AgentMetadata) -> Memory:
    """Where a peer's regions lie; in memory of our kind where it does not say."""
    return Memory(peer.memory_kind or ours.memory.kind, peer.device_id)


def key_order_of_peer(ours: LocalGeometry, peer: AgentMetadata) -> KeyOrder:
    """How keys lie in a block of a peer's."""
    return peer.key_order or ours.key_order


def dense_planes(
    ours: LocalGeometry,
    peer: AgentMetadata,
    region: int,
    offset_bytes: int,
    axes: Axes,
    shape: BlockShape,
    members: Sequence[Plane],
) -> tuple[Plane, ...]:
    """Our planes of one layer as they lie in a peer's region, in one dense piece of each block."""
    return DenseBlocks(
        peer.addresses[region] + offset_bytes,
        peer.stride_bytes[region],
        axes,
        peer.blocks,
        shape.heads,
        shape.tokens,
        shape.first_head,
        peer_memory(ours, peer),
        key_order_of_peer(ours, peer),
    ).planes(members)


def page_bytes_at(ours: LocalGeometry, peer: AgentMetadata, layer: LayerCache, tokens: int) -> int:
    """Bytes of a layer's block at a peer, where blocks of all layers have so many tokens."""
    _, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    # One number of ranks is asked for; and a slot holds all heads of a rank.
    if ours.layers_differ_in_shape or layer.planes[0].content is Content.SLOT:
        heads = layer.planes[0].counts.heads
    return row_bytes(layer.planes) * (heads if layer.has_heads else 1) * tokens
