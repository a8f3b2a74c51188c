"""Where a peer's layers lie, from 0.29 on: the name of its layout says what its regions are."""

from __future__ import annotations

from collections.abc import Mapping

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import (
    BY_COLUMN,
    LAYERS_INSIDE_BLOCKS,
    block_axes,
    inner_layout_of_axes,
    row_bytes,
)
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.region_slices import LayerSizes, Regions, RegionSlice
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import BlockShape, shape_at_peer, tokens_of
from kvpatch.peer.remote_planes import (
    dense_planes,
    key_order_of_peer,
    page_bytes_at,
)
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.registered_caches import LayerCache, differ_in_page_bytes


def by_layout(
    ours: LocalGeometry, units: tuple[tuple[str, ...], ...], peer: AgentMetadata
) -> tuple[tuple[Plane, ...], ...]:
    """A region is what its layout's name makes it."""
    if ours.layers_differ_in_shape:
        _check_plan(ours, peer)
    stated = peer.block_tokens or ours.block_tokens
    shapes = {
        name: shape_at_peer(
            ours,
            peer,
            layer.planes,
            page_bytes_at(ours, peer, layer, stated)
            if peer.layout in LAYERS_INSIDE_BLOCKS
            else peer.block_bytes[0],
        )
        for name, layer in ours.layers.items()
    }
    sizes = {
        name: LayerSizes(shapes[name].heads, row_bytes(layer.planes), shapes[name].tokens)
        for name, layer in ours.layers.items()
    }
    is_packed = ours.layers_differ_in_shape and peer.layout in LAYERS_INSIDE_BLOCKS
    regions = Regions(str(peer.layout), peer.block_bytes, names_by_attention(ours, peer))
    if is_packed:
        # Layers of several groups may begin in one place, with pages of several sizes: only the
        # cross-layer blocks that all lie in say where each is.
        regions = Regions(str(peer.layout), peer.stride_bytes[:1], None)
    slices = regions.slices(units, ours.cross_layer_groups, sizes)
    if is_packed:
        _check_starts(slices, peer)
    _check_packed(slices, sizes, peer)
    return tuple(
        _slice_planes(layer, region_slice, shapes[name], ours, peer)
        for name, layer in ours.layers.items()
        for region_slice in slices[name]
    )


def _check_plan(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Whether the release plans the same groups for layers of several shapes on both sides.

    Where layers are outside blocks it gives smaller ones blocks of more tokens, and all pages
    one size; where blocks are, they have one number of tokens, and pages lie packed.
    """
    is_packed = peer.layout in LAYERS_INSIDE_BLOCKS
    if is_packed and len(tokens_of(ours.layers, ours.layers)) == 1:
        return
    if peer.layout not in ("LBHNC", "LBNHC") or len(set(peer.block_bytes)) > 1:
        raise PeerRefused(
            "layers of several shapes are read from pages of one size in layout LBHNC or LBNHC",
            "use VLLM_KV_CACHE_LAYOUT=LBHNC on P",
        )
    if differ_in_page_bytes(ours.layers):
        raise PeerRefused(
            "our layers of several shapes are packed into rows, and its have pages of one size, "
            "in other groups",
            "use VLLM_KV_CACHE_LAYOUT=BLHNC on P, or LBHNC on D (KVCACHED_CONTIGUOUS_LAYOUT=false "
            "with kvcached)",
        )


def _check_starts(slices: Mapping[str, tuple[RegionSlice, ...]], peer: AgentMetadata) -> None:
    """Whether a peer's regions begin where layers do in the blocks that its first one begins."""
    starts = {one.offset_bytes for of_layer in slices.values() for one in of_layer}
    found = {address - peer.addresses[0] for address in peer.addresses}
    if not found <= starts or len(set(peer.stride_bytes)) > 1:
        raise PeerRefused(
            f"its regions begin {sorted(found)} bytes behind the first, every "
            f"{sorted(set(peer.stride_bytes))} bytes, and layers in its rows at {sorted(starts)}",
            "use one model and one vLLM on both sides, or VLLM_KV_CACHE_LAYOUT=LBHNC on both",
        )


def names_by_attention(ours: LocalGeometry, peer: AgentMetadata) -> tuple[str, ...] | None:
    """Which attention layer's each of a peer's regions is; None where it names none.

    A region is named after the layer that was registered first there, which in a hybrid model
    may be one with recurrent state.
    """
    if peer.region_names is None:
        return None
    there = {layer.planes[0].address: name for name, layer in reversed(tuple(ours.layers.items()))}
    states = {name: there.get(pages.address, name) for name, pages in ours.states.items()}
    return tuple(states.get(name, name) for name in peer.region_names)


def _check_packed(
    slices: Mapping[str, tuple[RegionSlice, ...]],
    sizes: Mapping[str, LayerSizes],
    peer: AgentMetadata,
) -> None:
    """Where a peer says how layers follow one another in its blocks, it must say the same."""
    if not peer.packed_layers:
        return
    found = {(name, slices[name][0].offset_bytes, size.block_bytes) for name, size in sizes.items()}
    if found != set(peer.packed_layers):
        raise PeerRefused(
            "its layers follow one another in a block's row in another way than ours would",
            "use one model and one vLLM on both sides, or VLLM_KV_CACHE_LAYOUT=LBHNC on P",
        )


def _slice_planes(
    layer: LayerCache,
    region_slice: RegionSlice,
    shape: BlockShape,
    ours: LocalGeometry,
    peer: AgentMetadata,
) -> tuple[Plane, ...]:
    axes = block_axes(str(peer.layout))
    if key_order_of_peer(ours, peer) is not KeyOrder.ROW_MAJOR:
        if inner_layout_of_axes(axes) == "NHD" and region_slice.heads > 1:
            raise PeerRefused("keys by column need a head's tokens in one piece", "use LBHNC on P")
        axes = BY_COLUMN
    of_slice = BlockShape(
        shape.first_head + region_slice.first_head, region_slice.heads, shape.tokens
    )
    return dense_planes(
        ours, peer, region_slice.region, region_slice.offset_bytes, axes, of_slice, layer.planes
    )
