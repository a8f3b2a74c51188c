"""The slices of a peer's regions that hold each layer, by the name of its layout (from 0.29).

What a region is, the connector decides by what is in one piece: a layer; a head of a layer,
where heads are outside blocks; or a cross-layer block, where a layer's part of it is not in
one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.layout_strides import LAYERS_INSIDE_BLOCKS, NAMED_LAYOUTS


@dataclass(frozen=True, order=True)
class LayerSizes:
    """The sizes of one layer's cache at the peer.

    Attributes:
        row_bytes: of one token of one head, keys and values together.
        tokens: of a block.
    """

    heads: int
    row_bytes: int
    tokens: int

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of a block of this layer."""
        return self.tokens * self.heads * self.row_bytes


@dataclass(frozen=True)
class RegionSlice:
    """Some heads of a layer, in one dense piece of each block of a region.

    Attributes:
        offset_bytes: from the region's start to the piece in block 0.
        first_head: among the layer's.
    """

    region: int
    offset_bytes: int
    first_head: int
    heads: int


@dataclass(frozen=True)
class Regions:
    """The regions that a peer states.

    Attributes:
        block_bytes: the bytes of a block in each region.
        names: the layer that each region is named after; None where it is not stated.
    """

    layout: str
    block_bytes: tuple[int, ...]
    names: tuple[str, ...] | None

    def slices(
        self,
        units: Sequence[tuple[str, ...]],
        groups: Sequence[Sequence[str]] | None,
        sizes: Mapping[str, LayerSizes],
    ) -> dict[str, tuple[RegionSlice, ...]]:
        """Every layer's slices.

        Args:
            units: the layers of each tensor, in the order in which tensors are registered.
            groups: each group's layers as they follow one another in a cross-layer block; None
                where nobody knows.

        Raises:
            PeerRefused: the regions are not what these sizes come to.
        """
        if self.layout not in NAMED_LAYOUTS:
            raise PeerRefused(
                f"layout {self.layout} is not known here",
                f"use one of {', '.join(NAMED_LAYOUTS)} (VLLM_KV_CACHE_LAYOUT)",
            )
        if self.names is not None and len(self.names) != len(self.block_bytes):
            raise PeerRefused(
                f"{len(self.names)} names for {len(self.block_bytes)} regions cannot be true",
                "use one vLLM and one kvpatch on both sides",
            )
        is_one = self.layout in LAYERS_INSIDE_BLOCKS and len(self.block_bytes) == 1
        if is_one and len(units) > 1:
            return self._in_cross_layer_blocks(groups, sizes)
        return self._in_own_regions(units, sizes)

    def _in_own_regions(
        self, units: Sequence[tuple[str, ...]], sizes: Mapping[str, LayerSizes]
    ) -> dict[str, tuple[RegionSlice, ...]]:
        by_head = self.layout == "LHBNC"
        counts = [sizes[unit[0]].heads if by_head else 1 for unit in units]
        if len(self.block_bytes) != sum(counts):
            raise PeerRefused(
                f"layout {self.layout} makes {sum(counts)} regions of our layers",
                "use one model, one attention backend and one --pipeline-parallel-size on both "
                "sides",
            )
        is_apart = self.layout in ("BLNHC", "BHLNC") and len(units) > 1
        if is_apart and any(layer.heads > 1 for layer in sizes.values()):
            raise PeerRefused(
                f"in layout {self.layout} a layer of several heads is not in one piece, and this "
                "peer says that it is a region",
                "use one vLLM on both sides",
            )
        found = {}
        start = 0
        for position, count in enumerate(counts):
            unit = units[position] if self.names is None else self._named(units, start, count)
            if any(layer in found for layer in unit):
                raise PeerRefused(f"layer {unit[0]} has two regions", "use one model")
            for layer in unit:
                found[layer] = self._layer_at(start, count, sizes[layer])
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

    def _layer_at(self, start: int, count: int, layer: LayerSizes) -> tuple[RegionSlice, ...]:
        # A region a head, or one of them all.
        parts = [LayerSizes(1, layer.row_bytes, layer.tokens)] * count if count > 1 else [layer]
        for number, part in enumerate(parts):
            self._check_bytes(start + number, part.block_bytes, part)
        return tuple(
            RegionSlice(start + number, 0, number, part.heads) for number, part in enumerate(parts)
        )

    def _in_cross_layer_blocks(
        self, groups: Sequence[Sequence[str]] | None, sizes: Mapping[str, LayerSizes]
    ) -> dict[str, tuple[RegionSlice, ...]]:
        if groups is None:
            raise PeerRefused(
                f"blocks of layout {self.layout} hold all layers, whose order is not known to us",
                "use VLLM_KV_CACHE_LAYOUT=LBHNC on the prefill side",
            )
        if self.names is not None and self.names[0] not in sizes:
            raise PeerRefused(f"its region is named {self.names[0]}", "use one model")
        # A block is one group's, and the group with the most bytes fills it.
        whole_bytes = max(sum(sizes[layer].block_bytes for layer in group) for group in groups)
        self._check_bytes(0, whole_bytes, max(sizes.values()))
        found: dict[str, tuple[RegionSlice, ...]] = {}
        # Each head's piece of every layer, then the next head's: a slice of its own for each head,
        # for one of them all would be nearly the whole block.
        by_head = self.layout == "BHLNC"
        for group in groups:
            if by_head and len({sizes[layer] for layer in group}) > 1:
                raise PeerRefused(
                    "layout BHLNC has no place for layers of several widths", "use BLHNC on P"
                )
            parts = sizes[group[0]].heads if by_head else 1
            step = sum(sizes[layer].block_bytes for layer in group) // parts
            offset = 0
            for layer in group:
                heads = sizes[layer].heads // parts
                found[layer] = tuple(
                    RegionSlice(0, part * step + offset, part * heads, heads)
                    for part in range(parts)
                )
                offset += sizes[layer].block_bytes // parts
        return found

    def _check_bytes(self, region: int, expected: int, layer: LayerSizes) -> None:
        found = self.block_bytes[region]
        if found != expected:
            raise PeerRefused(
                f"{layer.tokens} tokens of {layer.heads} heads come to {expected} bytes in a block "
                f"of layout {self.layout} and not to {found}",
                "both sides need one model, one --kv-cache-dtype and one attention backend, and "
                "pages without padding",
            )
