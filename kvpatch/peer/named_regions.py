"""The regions of a peer that names its layout (from 0.29): the name says what a region is.

What a region is, the connector decides by what is in one piece: a layer; a head of a layer,
where heads are outside blocks; or a cross-layer block, where a layer's part of it is not in
one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import (
    BY_COLUMN,
    LAYERS_INSIDE_BLOCKS,
    NAMED_LAYOUTS,
    block_axes,
    inner_layout_of_axes,
    row_bytes,
)
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import BlockShape, Piece, shape_at_peer, tokens_of
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.registered_caches import differ_in_page_bytes

_SAME_REGIONS = (
    "use one model, one attention backend and one --pipeline-parallel-size on both sides"
)


def by_layout(
    ours: LocalGeometry, units: tuple[tuple[str, ...], ...], peer: AgentMetadata
) -> Iterator[Piece]:
    """Yields the pieces of regions that are what their layout's name makes them."""
    if ours.layers_differ_in_shape:
        _check_plan(ours, peer)
    has_layers_inside = peer.layout in LAYERS_INSIDE_BLOCKS
    if str(peer.layout) not in NAMED_LAYOUTS:
        raise PeerRefused(
            f"layout {peer.layout} is not known here",
            f"use one of {', '.join(NAMED_LAYOUTS)} (VLLM_KV_CACHE_LAYOUT)",
        )
    axes = block_axes(str(peer.layout))
    by_column = (peer.key_order or ours.key_order) is not KeyOrder.ROW_MAJOR
    whole = {}
    for name, layer in ours.layers.items():
        size_bytes = None if has_layers_inside else peer.block_bytes[0]
        shape = shape_at_peer(ours, peer, layer.planes, size_bytes)
        whole[name] = Piece(layer.planes, 0, BY_COLUMN if by_column else axes, shape)
    block_bytes, names = peer.block_bytes, names_by_attention(ours, peer)
    is_packed = ours.layers_differ_in_shape and has_layers_inside
    if is_packed:
        # Layers of several groups may begin in one place, with pages of several sizes: only the
        # cross-layer blocks that all lie in say where each is.
        block_bytes, names = peer.stride_bytes[:1], None
    regions = NamedRegions(str(peer.layout), block_bytes, names)
    found = regions.pieces(units, ours.cross_layer_groups, whole)
    _check_places(found, whole, peer, is_packed=is_packed)
    pieces = [piece for name in ours.layers for piece in found[name]]
    has_tokens_outside = inner_layout_of_axes(axes) == "NHD"
    if by_column and has_tokens_outside and any(piece.shape.heads > 1 for piece in pieces):
        raise PeerRefused("keys by column need a head's tokens in one piece", "use LBHNC on P")
    yield from pieces


@dataclass(frozen=True)
class NamedRegions:
    """The regions that a peer states.

    Attributes:
        block_bytes: the bytes of a block in each region.
        names: the layer that each region is named after; None where it is not stated.
    """

    layout: str
    block_bytes: tuple[int, ...]
    names: tuple[str, ...] | None

    def pieces(
        self,
        units: Sequence[tuple[str, ...]],
        groups: Sequence[Sequence[str]] | None,
        whole: Mapping[str, Piece],
    ) -> dict[str, tuple[Piece, ...]]:
        """Every layer's pieces.

        Args:
            units: the layers of each tensor, in the order in which tensors are registered.
            groups: each group's layers as they follow one another in a cross-layer block; None
                where nobody knows.
            whole: a block of each layer, wherever it lies.

        Raises:
            PeerRefused: the regions are not what these blocks come to.
        """
        if self.names is not None and len(self.names) != len(self.block_bytes):
            raise PeerRefused(
                f"{len(self.names)} names for {len(self.block_bytes)} regions cannot be true",
                "use one vLLM and one kvpatch on both sides",
            )
        is_one = self.layout in LAYERS_INSIDE_BLOCKS and len(self.block_bytes) == 1
        if is_one and len(units) > 1:
            return self._in_cross_layer_blocks(groups, whole)
        return self._in_own_regions(units, whole)

    def _in_own_regions(
        self, units: Sequence[tuple[str, ...]], whole: Mapping[str, Piece]
    ) -> dict[str, tuple[Piece, ...]]:
        by_head = self.layout == "LHBNC"
        counts = [whole[unit[0]].shape.heads if by_head else 1 for unit in units]
        if len(self.block_bytes) != sum(counts):
            raise PeerRefused(
                f"layout {self.layout} makes {sum(counts)} regions of our layers",
                "use one model, one attention backend and one --pipeline-parallel-size on both "
                "sides",
            )
        is_apart = self.layout in ("BLNHC", "BHLNC") and len(units) > 1
        if is_apart and any(piece.shape.heads > 1 for piece in whole.values()):
            raise PeerRefused(
                f"in layout {self.layout} a layer of several heads is not in one piece, and this "
                "peer says that it is a region",
                "use one vLLM on both sides",
            )
        found: dict[str, tuple[Piece, ...]] = {}
        start = 0
        for position, count in enumerate(counts):
            unit = units[position] if self.names is None else self._named(units, start, count)
            if any(layer in found for layer in unit):
                raise PeerRefused(f"layer {unit[0]} has two regions", "use one model")
            for layer in unit:
                # A region a head, or one of them all.
                of_layer = _by_head(whole[layer]) if count > 1 else [whole[layer]]
                found[layer] = tuple(
                    piece._replace(region=start + number) for number, piece in enumerate(of_layer)
                )
                for piece in found[layer]:
                    self._check_bytes(piece, piece.size_bytes)
            start += count
        return found

    def _named(self, units: Sequence[tuple[str, ...]], start: int, count: int) -> tuple[str, ...]:
        """Our layers in the tensor that the peer names its regions from `start` on after."""
        names = set((self.names or ())[start : start + count])
        for unit in units:
            if len(names) == 1 and names <= set(unit):
                return unit
        raise PeerRefused(
            f"its regions are named {', '.join(sorted(names))}", "use one model on both sides"
        )

    def _in_cross_layer_blocks(
        self, groups: Sequence[Sequence[str]] | None, whole: Mapping[str, Piece]
    ) -> dict[str, tuple[Piece, ...]]:
        if groups is None:
            raise PeerRefused(
                f"blocks of layout {self.layout} hold all layers, whose order is not known to us",
                "use VLLM_KV_CACHE_LAYOUT=LBHNC on the prefill side",
            )
        if self.names is not None and self.names[0] not in whole:
            raise PeerRefused(f"its region is named {self.names[0]}", "use one model")
        # A block is one group's, and the group with the most bytes fills it.
        whole_bytes = max(sum(whole[layer].size_bytes for layer in group) for group in groups)
        largest = max(whole.values(), key=lambda piece: piece.size_bytes)
        self._check_bytes(largest, whole_bytes)
        found: dict[str, tuple[Piece, ...]] = {}
        for group in groups:
            # In BHLNC each head's piece of every layer, then the next head's. Each is a piece of
            # its own: one of all heads would be nearly the whole block.
            by_head = self.layout == "BHLNC"
            parts = {name: _by_head(whole[name]) if by_head else [whole[name]] for name in group}
            widths = {(row_bytes(whole[name].members), *whole[name].shape[1:]) for name in group}
            if by_head and len(widths) > 1:
                raise PeerRefused(
                    "layout BHLNC has no place for layers of several widths", "use BLHNC on P"
                )
            step, offset = sum(of[0].size_bytes for of in parts.values()), 0
            for name, of_layer in parts.items():
                found[name] = tuple(
                    piece._replace(offset_bytes=number * step + offset)
                    for number, piece in enumerate(of_layer)
                )
                offset += of_layer[0].size_bytes
        return found

    def _check_bytes(self, piece: Piece, expected: int) -> None:
        found = self.block_bytes[piece.region]
        if found != expected:
            raise PeerRefused(
                f"{piece.shape.tokens} tokens of {piece.shape.heads} heads come to {expected} "
                f"bytes in a block of layout {self.layout} and not to {found}",
                "both sides need one model, one --kv-cache-dtype and one attention backend, and "
                "pages without padding",
            )


def _by_head(piece: Piece) -> list[Piece]:
    first, heads, tokens = piece.shape
    return [piece._replace(shape=BlockShape(first + head, 1, tokens)) for head in range(heads)]


def _check_plan(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Refuses a peer whose release plans other groups for layers of several shapes.

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


def _check_places(
    found: Mapping[str, tuple[Piece, ...]],
    whole: Mapping[str, Piece],
    peer: AgentMetadata,
    *,
    is_packed: bool,
) -> None:
    """Refuses a peer that states other places of its layers than ours would have there."""
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
