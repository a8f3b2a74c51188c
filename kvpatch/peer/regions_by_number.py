"""Where a peer's layers lie, <= 0.28: its regions have the numbers of ours."""

from __future__ import annotations

from dataclasses import replace

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import (
    BY_COLUMN,
    HND,
    NHD,
    PACKED_HND,
    PACKED_NHD,
    Axes,
    row_bytes,
)
from kvpatch.geometry.plane import Plane
from kvpatch.peer.agent_metadata import MOST_TOKENS, AgentMetadata
from kvpatch.peer.block_shapes import heads_of, shape_at_peer
from kvpatch.peer.remote_planes import dense_planes, key_order_of_peer
from kvpatch.peer.split_kv import by_peers_regions, kv_split_of_peer
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.registered_caches import LayerCache


def by_number(ours: LocalGeometry, peer: AgentMetadata) -> tuple[tuple[Plane, ...], ...]:
    """A region holds what our region of the same number holds."""
    _check_regions(ours, peer)
    return tuple(
        region for name, layer in ours.layers.items() for region in _planes(name, layer, ours, peer)
    )


def tokens_in_bytes(ours: LocalGeometry, peer: AgentMetadata) -> int:
    """Tokens of a block of a peer that states its bytes only, if its items are like ours.

    Raises:
        PeerRefused: its regions are not those of our layers, or do not agree.
    """
    _check_regions(ours, peer)
    _, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    found = {
        divmod(
            peer.block_bytes[region],
            row_bytes(members) * (heads if layer.has_heads else 1),
        )
        for name, layer in ours.layers.items()
        for region, members in _regions(name, layer, ours, peer).items()
    }
    tokens, rest = found.pop()
    if found or rest or not 0 < tokens <= MOST_TOKENS:
        raise PeerRefused(
            "its blocks' bytes are no whole number of our tokens, and this release's handshake "
            "does not state the block size",
            "use one model, --dtype and --kv-cache-dtype",
        )
    return tokens


def _check_regions(ours: LocalGeometry, peer: AgentMetadata) -> None:
    if len(peer.addresses) != len(ours.addresses) and kv_split_of_peer(ours, peer) is None:
        raise PeerRefused(
            "both sides must register the same regions",
            "use one model, one attention backend and one --pipeline-parallel-size",
        )
    if ours.region_names and peer.region_names and ours.region_names != peer.region_names:
        raise PeerRefused(
            f"its regions are {', '.join(peer.region_names)} and ours "
            f"{', '.join(ours.region_names)}",
            "use one model on both sides",
        )


def _planes(
    name: str, layer: LayerCache, ours: LocalGeometry, peer: AgentMetadata
) -> list[tuple[Plane, ...]]:
    found = []
    for region, members in _regions(name, layer, ours, peer).items():
        by_turns = layer.has_heads_by_turns
        packed = len(members) == 2 and (by_turns or _is_packed(layer, peer))
        # Heads by turns are a token's keys and values side by side, head by head.
        at_peer = replace(peer, layout="NHD") if by_turns and packed else peer
        found.append(_region_planes(members, region, packed, ours, at_peer))
    return found


def _is_packed(layer: LayerCache, peer: AgentMetadata) -> bool:
    """Whether keys and values of a token are one row in the peer's blocks."""
    if peer.cache_shape is not None:
        return peer.cache_shape == "packed"
    return "packed" in layer.order.dimensions


def _regions(
    name: str, layer: LayerCache, ours: LocalGeometry, peer: AgentMetadata
) -> dict[int, list[Plane]]:
    """Our planes of one layer by the number of the peer's region that they lie in."""
    found: dict[int, list[Plane]] = {}
    region = None
    for plane in layer.planes:
        if plane.address in ours.addresses:
            region = ours.addresses.index(plane.address)
        if region is None:
            raise PeerRefused(
                f"layer {name} starts in none of our regions", "use layout HND or NHD"
            )
        found.setdefault(region, []).append(plane)
    return by_peers_regions(found, ours, peer)


def _region_planes(
    members: list[Plane], region: int, packed: bool, ours: LocalGeometry, peer: AgentMetadata
) -> tuple[Plane, ...]:
    shape = shape_at_peer(ours, peer, members, peer.block_bytes[region])
    found = shape.tokens * shape.heads * row_bytes(members)
    if found != peer.block_bytes[region]:
        raise PeerRefused(
            f"{shape.tokens} tokens of {shape.heads} heads come to {found} bytes and not to "
            f"{peer.block_bytes[region]}",
            "both sides need one model, one --kv-cache-dtype and one attention backend",
        )
    return dense_planes(ours, peer, region, 0, _region_axes(packed, ours, peer), shape, members)


def _region_axes(packed: bool, ours: LocalGeometry, peer: AgentMetadata) -> Axes:
    """How a layer lies in a block of a peer's region, whose layout is HND or NHD by its name."""
    if key_order_of_peer(ours, peer) is not KeyOrder.ROW_MAJOR:
        return BY_COLUMN
    # Only 0.10.0 states no layout. One of our backend means by a name what we mean by it, which
    # <= 0.28 need not be what the name says, and which blocks of one head do not show.
    layout = peer.inner_layout
    if peer.layout in (None, ours.layout) and peer.cache_shape is None:
        shows = ours.shows_layout or peer.layout is None
        layout = ours.inner_layout if shows else ours.backend_layout or peer.inner_layout
    if layout is None:
        raise PeerRefused(
            f"blocks of layout {peer.layout} are not in one piece", "use HND or NHD on P"
        )
    if layout == "HND":
        return PACKED_HND if packed else HND
    return PACKED_NHD if packed else NHD
