"""Where layers lie in the regions that a peer states, by its layout's name (from 0.29).

L, B, H, N and C are layers, blocks, heads, tokens and the content of a row, from the
outermost to the innermost. What a region is, the connector decides by what is in one
piece: a layer; a head of a layer, where heads are outside blocks; or the row of a block,
all layers together, where a layer's part of it is not in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpatch.core.errors import FromOutside

#: Every layout that vLLM names.
NAMED_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

#: Those in which a block of all layers is a row.
LAYERS_INSIDE_BLOCKS = ("BLHNC", "BLNHC", "BHLNC")
_TOKENS_OUTSIDE_HEADS = ("LBNHC", "BLNHC")


class UnknownRegions(FromOutside):
    """Regions that are not what the layout's name comes to; the message says what helps."""


@dataclass(frozen=True, order=True)
class LayerSizes:
    """One layer's cache at the peer.

    Attributes:
        row_bytes: of one token of one head, keys and values together.
        tokens: of a block.
    """

    heads: int
    row_bytes: int
    tokens: int


@dataclass(frozen=True)
class Piece:
    """Some heads of a layer, in one region.

    Attributes:
        offset_bytes: from the region's start to their place in block 0.
        first_head: among the layer's.
        head_bytes: from one head to the next.
        token_bytes: from one token to the next.
    """

    region: int
    offset_bytes: int
    first_head: int
    heads: int
    head_bytes: int
    token_bytes: int


@dataclass(frozen=True)
class Regions:
    """What a peer states of its regions.

    Attributes:
        block_bytes: of each region.
        names: the layer that each region is named after; None where it is not stated.
    """

    layout: str
    block_bytes: tuple[int, ...]
    names: tuple[str, ...] | None

    def pieces(
        self,
        units: Sequence[tuple[str, ...]],
        row_groups: Sequence[Sequence[str]] | None,
        sizes: Mapping[str, LayerSizes],
    ) -> dict[str, tuple[Piece, ...]]:
        """Every layer's pieces.

        Args:
            units: the layers of each tensor, in the order in which tensors are registered.
            row_groups: each group's layers as they follow one another in a block's row; None
                where nobody knows.

        Raises:
            UnknownRegions: the regions are not what these sizes come to.
        """
        if self.layout not in NAMED_LAYOUTS:
            raise UnknownRegions(
                f"layout {self.layout} is not known here: use one of {', '.join(NAMED_LAYOUTS)} "
                "(VLLM_KV_CACHE_LAYOUT)"
            )
        if self.names is not None and len(self.names) != len(self.block_bytes):
            raise UnknownRegions(
                f"{len(self.names)} names for {len(self.block_bytes)} regions cannot be true"
            )
        is_row = self.layout in LAYERS_INSIDE_BLOCKS and len(self.block_bytes) == 1
        if is_row and len(units) > 1:
            return self._in_a_row(row_groups, sizes)
        return self._in_own_regions(units, sizes)

    def _in_own_regions(
        self, units: Sequence[tuple[str, ...]], sizes: Mapping[str, LayerSizes]
    ) -> dict[str, tuple[Piece, ...]]:
        by_head = self.layout == "LHBNC"
        counts = [sizes[unit[0]].heads if by_head else 1 for unit in units]
        if len(self.block_bytes) != sum(counts):
            raise UnknownRegions(
                f"layout {self.layout} makes {sum(counts)} regions of our layers: use one model, "
                "one attention backend and one --pipeline-parallel-size on both sides"
            )
        is_apart = self.layout in ("BLNHC", "BHLNC") and len(units) > 1
        if is_apart and any(layer.heads > 1 for layer in sizes.values()):
            raise UnknownRegions(
                f"in layout {self.layout} a layer of several heads is not in one piece, and this "
                "peer says that it is a region: use one vLLM on both sides"
            )
        found = {}
        start = 0
        for position, count in enumerate(counts):
            unit = units[position] if self.names is None else self._named(units, start, count)
            if any(layer in found for layer in unit):
                raise UnknownRegions(f"layer {unit[0]} has two regions: use one model")
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
        raise UnknownRegions(
            f"its regions are named {', '.join(sorted(names))}: use one model on both sides"
        )

    def _layer_at(self, start: int, count: int, layer: LayerSizes) -> tuple[Piece, ...]:
        # A region a head, or one of them all.
        parts = [LayerSizes(1, layer.row_bytes, layer.tokens)] * count if count > 1 else [layer]
        found = []
        for number, part in enumerate(parts):
            region = start + number
            self._check_bytes(region, _page_bytes(part), part)
            found.append(Piece(region, 0, number, part.heads, *self._strides(part)))
        return tuple(found)

    def _in_a_row(
        self, row_groups: Sequence[Sequence[str]] | None, sizes: Mapping[str, LayerSizes]
    ) -> dict[str, tuple[Piece, ...]]:
        if row_groups is None:
            raise UnknownRegions(
                f"blocks of layout {self.layout} are rows of all layers, whose order is not known "
                "to us: use VLLM_KV_CACHE_LAYOUT=LBHNC on the prefill side"
            )
        if self.names is not None and self.names[0] not in sizes:
            raise UnknownRegions(f"its region is named {self.names[0]}: use one model")
        # A block is one group's, and the group with the most bytes fills its row.
        row_bytes = max(sum(_page_bytes(sizes[layer]) for layer in group) for group in row_groups)
        self._check_bytes(0, row_bytes, max(sizes.values()))
        found: dict[str, tuple[Piece, ...]] = {}
        for group in row_groups:
            if self.layout == "BHLNC":
                found.update(self._heads_of_all_layers(group, sizes))
                continue
            offset = 0
            for layer in group:
                sized = sizes[layer]
                found[layer] = (Piece(0, offset, 0, sized.heads, *self._strides(sized)),)
                offset += _page_bytes(sized)
        return found

    def _heads_of_all_layers(
        self,
        row_layers: Sequence[str],
        sizes: Mapping[str, LayerSizes],
    ) -> dict[str, tuple[Piece, ...]]:
        """Each head's piece of every layer, then the next head's.

        A piece of its own for each head: one of them all would be nearly the whole row.
        """
        if len({sizes[layer] for layer in row_layers}) > 1:
            raise UnknownRegions(
                "layout BHLNC has no place for layers of unlike widths: use BLHNC on P"
            )
        head_bytes = [sizes[layer].tokens * sizes[layer].row_bytes for layer in row_layers]
        step = sum(head_bytes)
        found, offset = {}, 0
        for layer, size in zip(row_layers, head_bytes, strict=True):
            token_bytes = sizes[layer].row_bytes
            found[layer] = tuple(
                Piece(0, head * step + offset, head, 1, size, token_bytes)
                for head in range(sizes[layer].heads)
            )
            offset += size
        return found

    def _strides(self, part: LayerSizes) -> tuple[int, int]:
        """(from head to head, from token to token) where a layer is in one piece."""
        if self.layout in _TOKENS_OUTSIDE_HEADS:
            return part.row_bytes, part.heads * part.row_bytes
        return part.tokens * part.row_bytes, part.row_bytes

    def _check_bytes(self, region: int, expected: int, layer: LayerSizes) -> None:
        found = self.block_bytes[region]
        if found != expected:
            raise UnknownRegions(
                f"{layer.tokens} tokens of {layer.heads} heads come to {expected} bytes in a block "
                f"of layout {self.layout} and not to {found}: both sides need one model, one "
                "--kv-cache-dtype and one attention backend, and pages without padding"
            )


def _page_bytes(layer: LayerSizes) -> int:
    return layer.tokens * layer.heads * layer.row_bytes
