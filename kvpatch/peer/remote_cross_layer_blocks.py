"""Where a peer's layers lie in cross-layer blocks, in the form that kvpatch states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import block_bytes
from kvpatch.geometry.plane import Plane
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import shape_at_peer
from kvpatch.peer.cross_layer_form import (
    CrossLayerForm,
    packed_digest,
    places_digest,
)
from kvpatch.peer.remote_planes import dense_planes, page_bytes_at
from kvpatch.worker.local_geometry import LocalGeometry


def in_cross_layer_blocks(
    ours: LocalGeometry, peer: AgentMetadata, form: CrossLayerForm
) -> tuple[tuple[Plane, ...], ...]:
    """Cross-layer blocks, of any release: each layer's part follows the one before."""
    if {ours.key_order, peer.key_order} - {None, KeyOrder.ROW_MAJOR}:
        raise PeerRefused("rows of all layers have no keys by column", "use a GPU's backend")
    packed = ours.cross_layer_groups
    if packed is not None and packed_digest(packed) == form.places:
        return tuple(_in_packed_blocks(ours, peer, form, packed))
    if (ours.cross_layer_places or places_digest(ours.places)) != form.places:
        raise PeerRefused(
            "its attention groups have other layers side by side than ours",
            "both sides need one model, one vLLM and the same of --disable-hybrid-kv-cache-manager "
            "and --speculative-config, or KVCACHED_CONTIGUOUS_LAYOUT=false on P",
        )
    found = []
    offset = size_bytes = 0
    even_bytes = peer.block_bytes[0] // len(ours.places)  # kvcached's, where layers differ in shape
    for layers in ours.places:
        for name in layers:
            planes, size_bytes = _part_of_block(ours, peer, form, name, offset, even_bytes)
            found.append(planes)
        offset += size_bytes
    _check_size(peer, form, offset)
    return tuple(found)


def _in_packed_blocks(
    ours: LocalGeometry,
    peer: AgentMetadata,
    form: CrossLayerForm,
    groups: Sequence[Sequence[str]],
) -> Iterator[tuple[Plane, ...]]:
    """Blocks that each group divides in its own way, all of one number of tokens."""
    ends = []
    for group in groups:
        offset = 0
        for name in group:
            page_bytes = page_bytes_at(ours, peer, ours.layers[name], form.block_tokens)
            planes, size_bytes = _part_of_block(ours, peer, form, name, offset, page_bytes)
            yield planes
            offset += size_bytes
        ends.append(offset)
    _check_size(peer, form, max(ends))


def _part_of_block(
    ours: LocalGeometry,
    peer: AgentMetadata,
    form: CrossLayerForm,
    name: str,
    offset: int,
    part_bytes: int,
) -> tuple[tuple[Plane, ...], int]:
    """A layer's planes `offset` bytes into a peer's blocks, and how many bytes it has there."""
    planes = ours.layers[name].planes
    has_heads = ours.layers[name].has_heads
    if has_heads != ("head" in form.axes) or len({plane.counts.channels for plane in planes}) > 1:
        raise PeerRefused(f"its rows {form} have no place for layer {name}", "use one model")
    shape = shape_at_peer(ours, peer, planes, part_bytes)
    found = dense_planes(ours, peer, 0, offset, form.axes, shape, planes)
    return found, block_bytes(found)


def _check_size(peer: AgentMetadata, form: CrossLayerForm, size_bytes: int) -> None:
    if size_bytes != peer.block_bytes[0]:
        raise PeerRefused(
            f"{form.block_tokens} tokens of all our layers come to {size_bytes} bytes and not to "
            f"{peer.block_bytes[0]}",
            "both sides need one model, one --kv-cache-dtype and one --pipeline-parallel-size",
        )
