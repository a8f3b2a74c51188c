"""The places of a peer's layers: its planes, from what it states and from our own layers.

Both ends run one model, so the peer holds the same contents, and in the same form, but where its
attention backend or its release is another, which is then said of it. In releases <= 0.28 a region
of the peer holds what our region of the same number holds; only sizes and the order of heads and
tokens differ, and the peer states those. From 0.29 on regions differ too, and follow from the
layout's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvpatch.core.errors import PeerRefused, UnreadableGeometry
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import (
    BY_COLUMN,
    HND,
    NHD,
    PACKED_HND,
    PACKED_NHD,
    Axes,
    DenseBlocks,
    row_bytes,
)
from kvpatch.geometry.plane import Plane
from kvpatch.peer.agent_metadata import (
    MOST_TOKENS,
    AgentMetadata,
    CrossLayerForm,
    packed_digest,
    places_digest,
)
from kvpatch.peer.block_shapes import (
    Piece,
    check_blocks,
    check_planes,
    check_tokens,
    heads_of,
    peer_memory,
    shape_at_peer,
)
from kvpatch.peer.named_regions import by_layout
from kvpatch.worker.local_geometry import KVSplit, LocalGeometry
from kvpatch.worker.registered_caches import LayerCache


def peer_regions(ours: LocalGeometry, peer: AgentMetadata) -> tuple[tuple[Plane, ...], ...]:
    """Returns a peer's planes; those whose blocks lie inside one another are together."""
    check_blocks(ours, peer)
    if peer.form is not None:
        pieces = _in_cross_layer_blocks(ours, peer, peer.form)
    elif ours.units is not None and peer.cache_shape in (None, "packed"):
        pieces = by_layout(ours, ours.units, peer)
    else:
        pieces = _by_number(ours, peer)
    memory, keys = peer_memory(ours, peer), peer.key_order or ours.key_order
    try:
        found = tuple(
            DenseBlocks(
                peer.addresses[piece.region] + piece.offset_bytes,
                peer.stride_bytes[piece.region],
                piece.axes,
                peer.blocks,
                piece.shape.heads,
                piece.shape.tokens,
                piece.shape.first_head,
                memory,
                keys,
            ).planes(piece.members)
            for piece in pieces
        )
    except UnreadableGeometry as error:  # sizes that overlap, or end beyond all addresses
        raise PeerRefused(
            f"its numbers cannot be true: {error}",
            "use one vLLM, one kvpatch and one model on both sides",
        ) from error
    planes = [plane for region in found for plane in region]
    check_tokens(ours, peer, planes)
    check_planes(ours, planes)
    return found


# --- <= 0.28: regions have the numbers of ours ----------------------------------------


def _by_number(ours: LocalGeometry, peer: AgentMetadata) -> Iterator[Piece]:
    """Yields the pieces of regions that hold what our region of the same number holds."""
    _check_regions(ours, peer)
    for name, layer in ours.layers.items():
        shape = peer.cache_shape or ("packed" if "packed" in layer.order.dimensions else None)
        for region, members in _regions(name, layer, ours, peer).items():
            found = shape_at_peer(ours, peer, members, peer.block_bytes[region])
            size_bytes = found.tokens * found.heads * row_bytes(members)
            if size_bytes != peer.block_bytes[region]:
                raise PeerRefused(
                    f"{found.tokens} tokens of {found.heads} heads come to {size_bytes} bytes and "
                    f"not to {peer.block_bytes[region]}",
                    "both sides need one model, one --kv-cache-dtype and one attention backend",
                )
            by_turns = len(members) == 2 and layer.has_heads_by_turns
            # Heads by turns are a token's keys and values side by side, head by head.
            axes = PACKED_NHD
            if not by_turns or (peer.key_order or ours.key_order) is not KeyOrder.ROW_MAJOR:
                axes = _region_axes(len(members) == 2 and shape == "packed", ours, peer)
            yield Piece(members, region, axes, found)


def _region_axes(packed: bool, ours: LocalGeometry, peer: AgentMetadata) -> Axes:
    """How a layer lies in a block of a peer's region, whose layout is HND or NHD by its name."""
    if (peer.key_order or ours.key_order) is not KeyOrder.ROW_MAJOR:
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


def tokens_in_bytes(ours: LocalGeometry, peer: AgentMetadata) -> int:
    """Returns the tokens that a block's bytes come to, if the peer's items are like ours."""
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


def _regions(
    name: str, layer: LayerCache, ours: LocalGeometry, peer: AgentMetadata
) -> dict[int, list[Plane]]:
    """Our planes of one layer by the number of the peer's region that they lie in."""
    theirs = kv_split_of_peer(ours, peer)
    own = ours.kv_split if peer.cache_shape is None else kv_split_of(ours)
    found: dict[int, list[Plane]] = {}
    region, number = None, 0
    for plane in layer.planes:
        if plane.address in ours.addresses:
            region, number = ours.addresses.index(plane.address), 0
        if region is None:
            raise PeerRefused(
                f"layer {name} starts in none of our regions", "use layout HND or NHD"
            )
        place = region
        if theirs not in (None, own):
            place = 2 * region + number if theirs == "apart" else region // 2
        found.setdefault(place, []).append(plane)
        number += 1
    return found


# --- cross-layer blocks ---------------------------------------------------------------


def _in_cross_layer_blocks(
    ours: LocalGeometry, peer: AgentMetadata, form: CrossLayerForm
) -> Iterator[Piece]:
    """Yields the pieces of cross-layer blocks, where each layer's part follows the one before.

    Where groups are packed, each divides the blocks in its own way, all of one number of tokens.
    """
    if {ours.key_order, peer.key_order} - {None, KeyOrder.ROW_MAJOR}:
        raise PeerRefused("rows of all layers have no keys by column", "use a GPU's backend")
    groups = ours.cross_layer_groups
    divisions: Sequence[Sequence[Sequence[str]]] = (ours.places,)
    is_packed = groups is not None and packed_digest(groups) == form.places
    if groups is not None and is_packed:
        divisions = [[(name,) for name in group] for group in groups]
    elif (ours.cross_layer_places or places_digest(ours.places)) != form.places:
        raise PeerRefused(
            "its attention groups have other layers side by side than ours",
            "both sides need one model, one vLLM and the same of --disable-hybrid-kv-cache-manager "
            "and --speculative-config, or KVCACHED_CONTIGUOUS_LAYOUT=false on P",
        )
    # kvcached's, where layers differ in shape.
    part_bytes = None if is_packed else peer.block_bytes[0] // len(ours.places)
    ends = []
    for division in divisions:
        offset = 0
        for names in division:
            for name in names:
                layer = ours.layers[name]
                channels = {plane.counts.channels for plane in layer.planes}
                if layer.has_heads != ("head" in form.axes) or len(channels) > 1:
                    raise PeerRefused(
                        f"its rows {form} have no place for layer {name}", "use one model"
                    )
                shape = shape_at_peer(ours, peer, layer.planes, part_bytes)
                piece = Piece(layer.planes, 0, form.axes, shape, offset)
                yield piece
            offset += piece.size_bytes
        ends.append(offset)
    if max(ends) != peer.block_bytes[0]:
        raise PeerRefused(
            f"{form.block_tokens} tokens of all our layers come to {max(ends)} bytes and not to "
            f"{peer.block_bytes[0]}",
            "both sides need one model, one --kv-cache-dtype and one --pipeline-parallel-size",
        )


# --- split K/V ------------------------------------------------------------------------
#
# In releases <= 0.25 FlashInfer's blocks hold keys and then values, and FlashAttention's from 0.23
# on; kvcached keeps the two apart. A handshake names neither, and states regions and bytes: a cache
# whose keys and values are split has twice the regions, of half a block each.


#: kvcached's pages are a multiple of this; its tensors end with the last whole page.
PAGE_BYTES = 2 << 20


def kv_split_of(ours: LocalGeometry) -> KVSplit | None:
    """Returns how a worker has registered keys and values that its backend's blocks hold both."""
    found = {
        sum(plane.address in ours.addresses for plane in layer.planes)
        for layer in ours.layers.values()
    }
    if found == {2}:
        return "apart"
    return "together" if found == {1} else None


def kv_split_of_peer(ours: LocalGeometry, peer: AgentMetadata) -> KVSplit | None:
    """Returns how a peer of our backend keeps keys and values; None where that is not in question.

    None too where its regions are neither ours, nor twice or half as many.
    """
    count, theirs = len(ours.addresses), len(peer.addresses)
    if peer.cache_shape is not None:
        return "apart" if peer.cache_shape == "keys first" else "together"
    if ours.kv_split is None or peer.form is not None:
        return None
    if theirs == count:
        return ours.kv_split
    if ours.kv_split == "together":
        return "apart" if theirs == 2 * count else None
    return "together" if 2 * theirs == count else None


def may_be_kvcacheds(peer: AgentMetadata, parts: Iterable[int]) -> bool:
    """True if a peer that states keys and values together may keep them apart.

    A worker with kvcached and without a patch for its tensors says what a plain one says.
    kvcached cuts a number of whole pages into blocks, and leaves less than a block over.

    Args:
        parts: into how many kernel blocks a block of its may be cut.
    """
    half_bytes = peer.block_bytes[0] // 2
    rest_bytes = -(peer.blocks * half_bytes) % PAGE_BYTES
    return any(peer.blocks % part == 0 and rest_bytes < part * half_bytes for part in parts)
