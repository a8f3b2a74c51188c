"""Where a peer's layers lie: its planes, from what it states and from how our own layers lie.

Both ends run one model and one attention backend (the release compares them), so the peer holds
the same contents in the same form. In releases <= 0.28 a region of the peer holds what our region
of the same number holds; only sizes and the order of heads and tokens differ, and the peer states
those. From 0.29 on regions differ too, and follow from the layout's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvpatch.connector.handshake.agent_metadata import MOST_TOKENS, AgentMetadata
from kvpatch.connector.handshake.block_shapes import (
    BlockShape,
    check_tokens,
    heads_of,
    shape_at_peer,
    tokens_of,
)
from kvpatch.connector.handshake.cross_layer_form import (
    CrossLayerForm,
    packed_digest,
    places_digest,
)
from kvpatch.connector.handshake.split_kv import by_peers_regions, kv_split_of_peer
from kvpatch.connector.handshake.whole_blocks import check_blocks, check_planes
from kvpatch.connector.local.local_geometry import LocalGeometry
from kvpatch.connector.local.registered_caches import LayerCache, differ_in_page_bytes
from kvpatch.core.errors import PeerRefused, UnreadableGeometry
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import (
    BY_COLUMN,
    HND,
    LAYERS_INSIDE_BLOCKS,
    NHD,
    PACKED_HND,
    PACKED_NHD,
    Axes,
    DenseBlocks,
    block_axes,
    block_bytes,
    inner_layout_of_axes,
    row_bytes,
)
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.region_slices import LayerSizes, Regions, RegionSlice


def peer_regions(ours: LocalGeometry, peer: AgentMetadata) -> tuple[tuple[Plane, ...], ...]:
    """Every plane of one rank of a peer; those whose blocks lie inside one another together.

    Raises:
        PeerRefused: its regions are not those of our layers, or a block's bytes are
            not what its sizes come to.
    """
    check_blocks(ours, peer)
    try:
        if peer.form is not None:
            found = _in_cross_layer_blocks(ours, peer, peer.form)
        elif ours.units is not None:
            found = _by_layout(ours, ours.units, peer)
        else:
            found = _by_address(ours, peer)
    except UnreadableGeometry as error:  # sizes that overlap, or end beyond all addresses
        raise PeerRefused(f"its numbers cannot be true: {error}") from error
    planes = [plane for region in found for plane in region]
    check_tokens(ours, peer, planes)
    check_planes(ours, planes)
    return found


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


def peer_memory(ours: LocalGeometry, peer: AgentMetadata) -> Memory:
    """Where a peer's regions lie; in memory of our kind where it does not say."""
    return Memory(peer.memory_kind or ours.memory.kind, peer.device_id)


def _dense_planes(
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
        ours.key_order,
    ).planes(members)


# --- cross-layer blocks, in the form that kvpatch states --------------------------------


def _in_cross_layer_blocks(
    ours: LocalGeometry, peer: AgentMetadata, form: CrossLayerForm
) -> tuple[tuple[Plane, ...], ...]:
    """Cross-layer blocks, of any release: each layer's part follows the one before."""
    if ours.key_order is KeyOrder.COLUMN_MAJOR:
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
            page_bytes = _page_bytes(ours, peer, ours.layers[name], form.block_tokens)
            planes, size_bytes = _part_of_block(ours, peer, form, name, offset, page_bytes)
            yield planes
            offset += size_bytes
        ends.append(offset)
    _check_size(peer, form, max(ends))


def _page_bytes(ours: LocalGeometry, peer: AgentMetadata, layer: LayerCache, tokens: int) -> int:
    """Bytes of a layer's block at a peer, where blocks of all layers have so many tokens."""
    _, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    # One number of ranks is asked for; and a slot holds all heads of a rank.
    if ours.layers_differ_in_shape or layer.planes[0].content is Content.SLOT:
        heads = layer.planes[0].counts.heads
    return row_bytes(layer.planes) * (heads if layer.has_heads else 1) * tokens


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
    found = _dense_planes(ours, peer, 0, offset, form.axes, shape, planes)
    return found, block_bytes(found)


def _check_size(peer: AgentMetadata, form: CrossLayerForm, size_bytes: int) -> None:
    if size_bytes != peer.block_bytes[0]:
        raise PeerRefused(
            f"{form.block_tokens} tokens of all our layers come to {size_bytes} bytes and not to "
            f"{peer.block_bytes[0]}",
            "both sides need one model, one --kv-cache-dtype and one --pipeline-parallel-size",
        )


# --- regions by the name of the layout (from 0.29) --------------------------------------


def _by_layout(
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
            _page_bytes(ours, peer, layer, stated)
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
        _slice_planes(layer, piece, shapes[name], ours, peer)
        for name, layer in ours.layers.items()
        for piece in slices[name]
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
    starts = {piece.offset_bytes for of_layer in slices.values() for piece in of_layer}
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
    piece: RegionSlice,
    shape: BlockShape,
    ours: LocalGeometry,
    peer: AgentMetadata,
) -> tuple[Plane, ...]:
    axes = block_axes(str(peer.layout))
    if ours.key_order is KeyOrder.COLUMN_MAJOR:
        if inner_layout_of_axes(axes) == "NHD" and piece.heads > 1:
            raise PeerRefused("keys by column need a head's tokens in one piece", "use LBHNC on P")
        axes = BY_COLUMN
    of_slice = BlockShape(shape.first_head + piece.first_head, piece.heads, shape.tokens)
    return _dense_planes(ours, peer, piece.region, piece.offset_bytes, axes, of_slice, layer.planes)


# --- regions by their number (<= 0.28) --------------------------------------------------


def _by_address(ours: LocalGeometry, peer: AgentMetadata) -> tuple[tuple[Plane, ...], ...]:
    """A region holds what our region of the same number holds."""
    _check_regions(ours, peer)
    return tuple(
        region for name, layer in ours.layers.items() for region in _planes(name, layer, ours, peer)
    )


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
        packed = len(members) == 2 and (by_turns or "packed" in layer.order.dimensions)
        # Heads by turns are a token's keys and values side by side, head by head.
        at_peer = replace(peer, layout="NHD") if by_turns and packed else peer
        found.append(_region_planes(members, region, packed, ours, at_peer))
    return found


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
    return _dense_planes(ours, peer, region, 0, _region_axes(packed, ours, peer), shape, members)


def _region_axes(packed: bool, ours: LocalGeometry, peer: AgentMetadata) -> Axes:
    """How a layer lies in a block of a peer's region, whose layout is HND or NHD by its name."""
    if ours.key_order is KeyOrder.COLUMN_MAJOR:
        return BY_COLUMN
    # Only 0.10.0 states no layout. One of our backend means by a name what we mean by it, which
    # <= 0.28 need not be what the name says, and which blocks of one head do not show.
    layout = peer.inner_layout
    if peer.layout in (None, ours.layout):
        shows = ours.shows_layout or peer.layout is None
        layout = ours.inner_layout if shows else ours.backend_layout or peer.inner_layout
    if layout is None:
        raise PeerRefused(
            f"blocks of layout {peer.layout} are not in one piece", "use HND or NHD on P"
        )
    if layout == "HND":
        return PACKED_HND if packed else HND
    return PACKED_NHD if packed else NHD
