"""The places of a peer's layers: its planes, from what it states and from our own layers.

Both ends run one model, so the peer holds the same contents, and in the same form, but where its
attention backend or its release is another, which is then said of it. In releases <= 0.28 a region
of the peer holds what our region of the same number holds; only sizes and the order of heads and
tokens differ, and the peer states those. From 0.29 on regions differ too, and follow from the
layout's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvpatch.core.errors import PeerRefused, UnreadableGeometry
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import (
    BY_COLUMN,
    HND,
    LAYERS_INSIDE_BLOCKS,
    NAMED_LAYOUTS,
    NHD,
    PACKED_HND,
    PACKED_NHD,
    Axes,
    DenseBlocks,
    block_axes,
    inner_layout_of_axes,
    row_bytes,
)
from kvpatch.geometry.plane import Content, Plane
from kvpatch.peer.agent_metadata import (
    MOST_TOKENS,
    AgentMetadata,
    CrossLayerForm,
    packed_digest,
    places_digest,
)
from kvpatch.peer.block_shapes import (
    ONE_SIZE,
    check_blocks,
    check_planes,
    check_tokens,
    has_unlike_shares,
    heads_of,
    kv_split_of,
    kv_split_of_peer,
    peer_memory,
    tokens_of,
)
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.registered_caches import LayerCache, differ_in_page_bytes


class BlockShape(NamedTuple):
    """The shape of one layer's blocks on one rank of a peer."""

    first_head: int
    heads: int
    tokens: int


class Piece(NamedTuple):
    """Some heads of a layer of ours, in one dense piece of each block of a peer's region.

    Attributes:
        members: our planes of what is in it.
        offset_bytes: from the region's start to the piece in the first block.
    """

    members: Sequence[Plane]
    region: int
    axes: Axes
    shape: BlockShape
    offset_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Returns the bytes that it takes of a block."""
        return self.shape.tokens * self.shape.heads * row_bytes(self.members)


def shape_at_peer(
    ours: LocalGeometry, peer: AgentMetadata, members: Sequence[Plane], size_bytes: int | None
) -> BlockShape:
    """Returns the heads and tokens of a layer in a peer's block of so many bytes.

    Args:
        members: our planes of what is in that block.
        size_bytes: None where blocks of all layers have the tokens that the peer states.
    """
    first, tokens = members[0], peer.block_tokens or ours.block_tokens
    first_head, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    if first.content is Content.LATENT:
        return BlockShape(0, 1, tokens)
    if first.content is Content.SLOT:
        return BlockShape(first_head * first.counts.heads, first.counts.heads, tokens)
    if not (ours.layers_differ_in_shape or has_unlike_shares(ours, peer)):
        return BlockShape(first_head, heads, tokens)
    first_head, heads = first.first_head, first.counts.heads
    if (peer.tp_rank, peer.tp_size) != (ours.tp_rank, ours.tp_size):
        is_shared = len(ours.totals_of(heads)) > 1
        first_head, heads = heads_of(ours.total_of(heads), peer.tp_rank, peer.tp_size)
        # Of heads that ranks share all totals tell the same where a rank has one on both sides.
        is_known = ours.groups is not None and not (ours.has_draft or ours.has_latents)
        if not is_known or has_unlike_shares(ours, peer) or (is_shared and heads > 1):
            raise PeerRefused(
                "layers of several shapes or numbers of KV heads are read from as many ranks "
                "alone, where ranks share some layers' heads, or a model drafts tokens",
                ONE_SIZE,
            )
    if size_bytes is None:
        return BlockShape(first_head, heads, tokens)
    token_bytes = heads * row_bytes(members)
    tokens, rest = divmod(size_bytes, token_bytes)
    if rest or not tokens:
        raise PeerRefused(
            f"{size_bytes} bytes are no whole number of tokens of layer {first.layer}, which "
            f"take {token_bytes}",
            "use one model, --dtype and --kv-cache-dtype",
        )
    return BlockShape(first_head, heads, tokens)


def peer_regions(ours: LocalGeometry, peer: AgentMetadata) -> tuple[tuple[Plane, ...], ...]:
    """Returns a peer's planes; those whose blocks lie inside one another are together."""
    check_blocks(ours, peer)
    if peer.form is not None:
        pieces = _in_cross_layer_blocks(ours, peer, peer.form)
    elif ours.units is not None and peer.cache_shape in (None, "packed"):
        pieces = _by_layout(ours, ours.units, peer)
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
    by_column = (peer.key_order or ours.key_order) is not KeyOrder.ROW_MAJOR
    # Only 0.10.0 states no layout. One of our backend means by a name what we mean by it, which
    # <= 0.28 need not be what the name says, and which blocks of one head do not show.
    is_alike = peer.layout in (None, ours.layout) and peer.cache_shape is None
    layout = ours.inner_layout if is_alike else peer.inner_layout
    for layer, region, members in _regions(ours, peer):
        shape = peer.cache_shape or ("packed" if "packed" in layer.order.dimensions else None)
        found = shape_at_peer(ours, peer, members, peer.block_bytes[region])
        size_bytes = found.tokens * found.heads * row_bytes(members)
        if size_bytes != peer.block_bytes[region]:
            raise PeerRefused(
                f"{found.tokens} tokens of {found.heads} heads come to {size_bytes} bytes and "
                f"not to {peer.block_bytes[region]}",
                "both sides need one model, one --kv-cache-dtype and one attention backend",
            )
        has_both = len(members) == 2
        is_packed = has_both and shape == "packed"
        if by_column:
            axes = BY_COLUMN
        elif has_both and layer.has_heads_by_turns:
            axes = PACKED_NHD  # a token's keys and values are side by side, head by head
        elif layout is None:
            raise PeerRefused(
                f"blocks of layout {peer.layout} are not in one piece", "use HND or NHD on P"
            )
        elif layout == "HND":
            axes = PACKED_HND if is_packed else HND
        else:
            axes = PACKED_NHD if is_packed else NHD
        yield Piece(members, region, axes, found)


def tokens_in_bytes(ours: LocalGeometry, peer: AgentMetadata) -> int:
    """Returns the tokens that a block's bytes come to, if the peer's items are like ours."""
    _, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    found = {
        divmod(peer.block_bytes[region], row_bytes(members) * (heads if layer.has_heads else 1))
        for layer, region, members in _regions(ours, peer)
    }
    tokens, rest = found.pop()
    if found or rest or not 0 < tokens <= MOST_TOKENS:
        raise PeerRefused(
            "its blocks' bytes are no whole number of our tokens, and this release's handshake "
            "does not state the block size",
            "use one model, --dtype and --kv-cache-dtype",
        )
    return tokens


def _regions(
    ours: LocalGeometry, peer: AgentMetadata
) -> Iterator[tuple[LayerCache, int, list[Plane]]]:
    """Yields our planes of each layer by the number of the peer's region that they lie in."""
    theirs = kv_split_of_peer(ours, peer)
    if len(peer.addresses) != len(ours.addresses) and theirs is None:
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
    own = ours.kv_split if peer.cache_shape is None else kv_split_of(ours)
    for name, layer in ours.layers.items():
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
        for place, members in found.items():
            yield layer, place, members


# --- from 0.29 on a layout's name says what a region is -------------------------------
#
# The connector decides by what is in one piece: a layer; a head of a layer, where heads are outside
# blocks; or a cross-layer block, where a layer's part of it is not in one piece.


def _by_layout(
    ours: LocalGeometry, units: tuple[tuple[str, ...], ...], peer: AgentMetadata
) -> Iterator[Piece]:
    """Yields the pieces of regions that are what their layout's name makes them.

    Where layers of several shapes and groups are outside blocks, vLLM gives smaller ones blocks of
    more tokens, and all pages one size. Those of one group (a draft model's are in that of the
    others) have one number of tokens there, and pages of several sizes; where blocks are outside,
    all have, and pages lie packed.

    Args:
        units: our layers of each tensor, in the order in which tensors are registered.
    """
    layout, names = str(peer.layout), names_by_attention(ours, peer)
    has_layers_inside = layout in LAYERS_INSIDE_BLOCKS
    has_one_size = len(tokens_of(ours.layers, ours.layers)) == 1
    has_unlike_pages = ours.layers_differ_in_shape and len(set(peer.block_bytes)) > 1
    if ours.layers_differ_in_shape and not (has_layers_inside and has_one_size):
        if layout not in ("LBHNC", "LBNHC"):
            raise PeerRefused(
                "layers of several shapes are read from layout LBHNC or LBNHC",
                "use VLLM_KV_CACHE_LAYOUT=LBHNC on P",
            )
        if has_unlike_pages and not (has_one_size and ours.groups is None):
            raise PeerRefused(
                "its layers of several shapes have pages of several sizes, and ours are in several "
                "groups",
                "use one --block-size on both sides",
            )
        if differ_in_page_bytes(ours.layers) and not has_unlike_pages:
            raise PeerRefused(
                "our layers of several shapes are packed into rows, and its have pages of one "
                "size, in other groups",
                "use VLLM_KV_CACHE_LAYOUT=BLHNC on P, or LBHNC on D "
                "(KVCACHED_CONTIGUOUS_LAYOUT=false with kvcached)",
            )
    if layout not in NAMED_LAYOUTS:
        raise PeerRefused(
            f"layout {peer.layout} is not known here",
            f"use one of {', '.join(NAMED_LAYOUTS)} (VLLM_KV_CACHE_LAYOUT)",
        )
    axes = block_axes(layout)
    by_column = (peer.key_order or ours.key_order) is not KeyOrder.ROW_MAJOR
    whole = {}
    for name, layer in ours.layers.items():
        size_bytes = None if has_layers_inside or has_unlike_pages else peer.block_bytes[0]
        shape = shape_at_peer(ours, peer, layer.planes, size_bytes)
        whole[name] = Piece(layer.planes, 0, BY_COLUMN if by_column else axes, shape)
    block_bytes = peer.block_bytes
    is_packed = ours.layers_differ_in_shape and has_layers_inside
    if is_packed:
        # Layers of several groups may begin in one place, with pages of several sizes: only the
        # cross-layer blocks that all lie in say where each is.
        block_bytes, names = peer.stride_bytes[:1], None
    if names is not None and len(names) != len(block_bytes):
        raise PeerRefused(
            f"{len(names)} names for {len(block_bytes)} regions cannot be true",
            "use one vLLM and one kvpatch on both sides",
        )
    if has_layers_inside and len(block_bytes) == 1 and len(units) > 1:
        found = _in_named_blocks(layout, block_bytes, names, ours.cross_layer_groups, whole)
    else:
        found = _in_own_regions(layout, block_bytes, names, units, whole)
    starts = {piece.offset_bytes for of_layer in found.values() for piece in of_layer}
    begin = {address - peer.addresses[0] for address in peer.addresses}
    if is_packed and not (begin <= starts and len(set(peer.stride_bytes)) == 1):
        raise PeerRefused(
            f"its regions begin {sorted(begin)} bytes behind the first, every "
            f"{sorted(set(peer.stride_bytes))} bytes, and layers in its rows at {sorted(starts)}",
            "use one model and one vLLM on both sides, or VLLM_KV_CACHE_LAYOUT=LBHNC on both",
        )
    places = {(name, of[0].offset_bytes, whole[name].size_bytes) for name, of in found.items()}
    if peer.packed_layers and places != set(peer.packed_layers):
        raise PeerRefused(
            "its layers follow one another in a block's row in another way than ours would",
            "use one model and one vLLM on both sides, or VLLM_KV_CACHE_LAYOUT=LBHNC on P",
        )
    pieces = [piece for name in ours.layers for piece in found[name]]
    has_tokens_outside = inner_layout_of_axes(axes) == "NHD"
    if by_column and has_tokens_outside and any(piece.shape.heads > 1 for piece in pieces):
        raise PeerRefused("keys by column need a head's tokens in one piece", "use LBHNC on P")
    yield from pieces


def _in_own_regions(
    layout: str,
    block_bytes: tuple[int, ...],
    names: tuple[str, ...] | None,
    units: Sequence[tuple[str, ...]],
    whole: Mapping[str, Piece],
) -> dict[str, list[Piece]]:
    """Returns each layer's pieces, where a region is of a layer, or of one of its heads.

    Args:
        block_bytes: the bytes of a block in each region.
        names: the layer that each region is named after; None where it is not stated.
        whole: a block of each layer, wherever it lies.
    """
    by_head = layout == "LHBNC"
    counts = [whole[unit[0]].shape.heads if by_head else 1 for unit in units]
    if len(block_bytes) != sum(counts):
        raise PeerRefused(
            f"layout {layout} makes {sum(counts)} regions of our layers",
            "use one model and one attention backend on both sides, and --pipeline-parallel-size 1 "
            "on the prefill side",
        )
    is_apart = layout in ("BLNHC", "BHLNC") and len(units) > 1
    if is_apart and any(piece.shape.heads > 1 for piece in whole.values()):
        raise PeerRefused(
            f"in layout {layout} a layer of several heads is not in one piece, and this peer says "
            "that it is a region",
            "use one vLLM on both sides",
        )
    found: dict[str, list[Piece]] = {}
    start = 0
    for unit, count in zip(units, counts, strict=True):
        if names is not None:
            named = {*names[start : start + count]}
            fit = [one for one in units if len(named) == 1 and named <= {*one}]
            if not fit:
                raise PeerRefused(
                    f"its regions are named {', '.join(sorted(named))}",
                    "use one model on both sides, and --pipeline-parallel-size 1 on the prefill "
                    "side",
                )
            unit = fit[0]
        if any(layer in found for layer in unit):
            raise PeerRefused(f"layer {unit[0]} has two regions", "use one model")
        for layer in unit:
            # A region a head, or one of them all.
            of_layer = _by_head(whole[layer]) if count > 1 else [whole[layer]]
            found[layer] = [one._replace(region=start + n) for n, one in enumerate(of_layer)]
            for piece in found[layer]:
                _check_bytes(layout, piece, piece.size_bytes, block_bytes)
        start += count
    return found


def _in_named_blocks(
    layout: str,
    block_bytes: tuple[int, ...],
    names: tuple[str, ...] | None,
    groups: Sequence[Sequence[str]] | None,
    whole: Mapping[str, Piece],
) -> dict[str, list[Piece]]:
    """Returns each layer's pieces in the cross-layer blocks of a release.

    Args:
        groups: each group's layers as they follow one another in a block; None where nobody knows.
    """
    if groups is None:
        raise PeerRefused(
            f"blocks of layout {layout} hold all layers, whose order is not known to us",
            "use VLLM_KV_CACHE_LAYOUT=LBHNC on the prefill side",
        )
    if names is not None and names[0] not in whole:
        raise PeerRefused(
            f"its region is named {names[0]}",
            "use one model, and VLLM_KV_CACHE_LAYOUT=LBHNC where this engine has pipeline stages",
        )
    # A block is one group's, and the group with the most bytes fills it.
    whole_bytes = max(sum(whole[layer].size_bytes for layer in group) for group in groups)
    largest = max(whole.values(), key=lambda piece: piece.size_bytes)
    _check_bytes(layout, largest, whole_bytes, block_bytes)
    found: dict[str, list[Piece]] = {}
    # In BHLNC each head's piece of every layer, then the next head's. Each is a piece of its own:
    # one of all heads would be nearly the whole block.
    by_head = layout == "BHLNC"
    for group in groups:
        parts = {name: _by_head(whole[name]) if by_head else [whole[name]] for name in group}
        widths = {(row_bytes(whole[name].members), *whole[name].shape[1:]) for name in group}
        if by_head and len(widths) > 1:
            raise PeerRefused(
                "layout BHLNC has no place for layers of several widths", "use BHLNC on P"
            )
        step, offset = sum(of[0].size_bytes for of in parts.values()), 0
        for name, of_layer in parts.items():
            found[name] = [
                piece._replace(offset_bytes=number * step + offset)
                for number, piece in enumerate(of_layer)
            ]
            offset += of_layer[0].size_bytes
    return found


def _check_bytes(layout: str, piece: Piece, expected: int, block_bytes: tuple[int, ...]) -> None:
    found = block_bytes[piece.region]
    if found != expected:
        raise PeerRefused(
            f"{piece.shape.tokens} tokens of {piece.shape.heads} heads come to {expected} bytes in "
            f"a block of layout {layout} and not to {found}",
            "both sides need one model, one --kv-cache-dtype and one attention backend, and pages "
            "without padding",
        )


def _by_head(piece: Piece) -> list[Piece]:
    first, heads, tokens = piece.shape
    return [piece._replace(shape=BlockShape(first + head, 1, tokens)) for head in range(heads)]


def names_by_attention(ours: LocalGeometry, peer: AgentMetadata) -> tuple[str, ...] | None:
    """Returns which attention layer's each of a peer's regions is; None where it names none.

    A region is named after the layer that was registered first there, which in a hybrid model
    may be one with recurrent state.
    """
    if peer.region_names is None:
        return None
    there = {layer.planes[0].address: name for name, layer in reversed(tuple(ours.layers.items()))}
    states = {name: there.get(pages.address, name) for name, pages in ours.states.items()}
    return tuple(states.get(name, name) for name in peer.region_names)


# --- kvpatch's cross-layer blocks ---------------------------------------------------------------


def _in_cross_layer_blocks(
    ours: LocalGeometry, peer: AgentMetadata, form: CrossLayerForm
) -> Iterator[Piece]:
    """Yields the pieces of cross-layer blocks, where each layer's part follows the one before.

    Where groups are packed, each divides the blocks in its own way, all of one number of tokens.
    """
    if {ours.key_order, peer.key_order} - {None, KeyOrder.ROW_MAJOR}:
        raise PeerRefused("rows of all layers have no keys by column", "use a GPU's backend")
    if {*(peer.region_names or ())} - {*ours.layers, *ours.states}:  # those of another stage
        raise PeerRefused(
            f"its rows begin with layer {', '.join(peer.region_names or ())}",
            "use one model, and KVCACHED_CONTIGUOUS_LAYOUT=false on P where this engine has "
            "pipeline stages",
        )
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
