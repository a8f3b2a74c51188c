"""The strides of each layout: the one place that works them out.

A layout is an order of axes, from the outermost to the innermost, densely packed. The blocks of
a registered tensor, a peer's regions and cross-layer blocks are all made of dense pieces: a
layer's content of one block, or some heads of it (:class:`DenseBlocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Literal

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides, Tile

Axis = Literal["layer", "kv", "block", "head", "token", "channel"]
#: Some of the axes, from the outermost to the innermost.
Axes = tuple[Axis, ...]

HND: Axes = ("kv", "head", "token", "channel")
NHD: Axes = ("kv", "token", "head", "channel")
#: Keys and values are packed into one row of a token and head.
PACKED_HND: Axes = ("head", "token", "kv", "channel")
PACKED_NHD: Axes = ("token", "head", "kv", "channel")
#: A head's keys of all tokens, by column or in tiles, and then its values: the CPU backend's.
BY_COLUMN: Axes = ("head", "kv", "token", "channel")
#: MLA, its indexers, hidden states.
WITHOUT_HEADS: Axes = ("token", "channel")

#: Every layout that vLLM names from 0.29 on: L, B, H, N and C are layers, blocks, heads, tokens,
#: and keys and values packed.
NAMED_LAYOUTS: Mapping[str, Axes] = MappingProxyType(
    {
        "LBHNC": ("layer", "block", "head", "token", "kv", "channel"),
        "LBNHC": ("layer", "block", "token", "head", "kv", "channel"),
        "LHBNC": ("layer", "head", "block", "token", "kv", "channel"),
        "BLHNC": ("block", "layer", "head", "token", "kv", "channel"),
        "BLNHC": ("block", "layer", "token", "head", "kv", "channel"),
        "BHLNC": ("block", "head", "layer", "token", "kv", "channel"),
    }
)

#: Those whose blocks are cross-layer blocks: a block holds all layers.
LAYERS_INSIDE_BLOCKS = tuple(
    name for name, axes in NAMED_LAYOUTS.items() if axes.index("block") < axes.index("layer")
)

#: Those in which each layer's blocks are one behind the other, a state's pages too.
LAYER_BY_LAYER = ("HND", "NHD", "LBHNC", "LBNHC")

InnerLayout = Literal["HND", "NHD"]

#: A row of AMX's tiles has so many words, each of two items: of channels for keys, of tokens for
#: values. A tile has as many tokens of keys, or channels of values, as a row has words.
_TILE_WORDS, _WORD_ITEMS, TILED_ITEM_BYTES = 16, 2, 2
#: For tiles, the tokens of a CPU backend's blocks and the channels of its heads are multiples.
TILED_TOKENS = TILED_CHANNELS = 32


def block_axes(layout: str) -> Axes:
    """The axes of a layer in a block of a named layout, or of one head where heads are apart."""
    return tuple(axis for axis in NAMED_LAYOUTS[layout] if axis not in ("layer", "block"))


def inner_layout(layout: str | None) -> InnerLayout | None:
    """Returns the order inside a layer's block, by a layout's name.

    A head's tokens are neighbours in HND, a token's heads in NHD. None for a name that is not
    known here, and where a layer's block is not in one piece of its own.
    """
    if layout in ("HND", "LBHNC", "BLHNC"):
        return "HND"
    return "NHD" if layout in ("NHD", "LBNHC") else None


def layer_by_layer(inner: InnerLayout, like: str) -> str:
    """Returns the name of a layout with layers apart, as the release that says `like` calls it."""
    if like in ("HND", "NHD"):
        return inner
    return "LBHNC" if inner == "HND" else "LBNHC"


def inner_layout_of_axes(axes: Sequence[str]) -> InnerLayout:
    """HND or NHD; HND where there are no heads."""
    is_nhd = "head" in axes and axes.index("token") < axes.index("head")
    return "NHD" if is_nhd else "HND"


def dense_strides(
    axes: Sequence[Axis], extents: Mapping[Axis, int], channels: Sequence[int], item_bytes: int
) -> dict[Axis, int]:
    """Returns the bytes from one step to the next along each axis of a dense array.

    Args:
        extents: of all axes but `kv` and `channel`.
        channels: of each content, which `kv` steps over.

    Raises:
        UnreadableGeometry: contents of several widths where they are not packed.
    """
    is_packed = tuple(axes[-2:]) == ("kv", "channel")
    if len(set(channels)) > 1 and not is_packed:
        raise UnreadableGeometry(
            f"axes {'-'.join(axes)}: expected keys and values of one width, found "
            f"{tuple(channels)}; only packed layouts hold others"
        )
    sizes = {**extents, "kv": len(channels), "channel": channels[0]}
    strides: dict[Axis, int] = {}
    step = item_bytes
    for axis in reversed(axes):
        strides[axis] = step
        step *= sizes[axis]
        if axis == "kv" and is_packed:
            step = sum(channels) * item_bytes
    return strides


def strides_of_order(
    order: KeyOrder, content: Content, tokens: int, channels: int, item_bytes: int
) -> tuple[int, int, Tile | None]:
    """Strides of tokens and channels, and the tile, where a head's keys are one piece of a block.

    As the CPU backend has them.

    Raises:
        UnreadableGeometry: tiles of other items or blocks than it makes them of.
    """
    if order is KeyOrder.COLUMN_MAJOR and content is Content.KEY:
        return item_bytes, tokens * item_bytes, None
    if order is not KeyOrder.TILED:
        return channels * item_bytes, item_bytes, None
    if item_bytes != TILED_ITEM_BYTES or tokens % TILED_TOKENS or channels % TILED_CHANNELS:
        raise UnreadableGeometry(
            f"expected tiles of items of {TILED_ITEM_BYTES} bytes, {TILED_TOKENS} tokens and "
            f"{TILED_CHANNELS} channels or a multiple, found blocks of {tokens} tokens, {channels} "
            f"channels of {item_bytes} bytes"
        )
    word = _WORD_ITEMS * item_bytes
    row = _TILE_WORDS * word
    if content is Content.KEY:  # [16 tokens, word of channels, token, channel]
        tile = Tile(_TILE_WORDS, word, _WORD_ITEMS, item_bytes)
        return _TILE_WORDS * channels * item_bytes, row, tile
    # [16 channels, word of tokens, channel, token]
    return row, _TILE_WORDS * tokens * item_bytes, Tile(_WORD_ITEMS, item_bytes, _TILE_WORDS, word)


@dataclass(frozen=True)
class DenseBlocks:
    """Blocks in each of which a layer, or some of its heads, is one dense piece.

    Attributes:
        address: of the piece in the first block.
        stride_bytes: from one block to the next.
        first_head: the global number of the piece's first head.
        key_order: COLUMN_MAJOR swaps token and channel for the keys; TILED has a head's keys and
            values in tiles.
    """

    address: int
    stride_bytes: int
    axes: Axes
    blocks: int
    heads: int
    tokens: int
    first_head: int
    memory: Memory
    key_order: KeyOrder = KeyOrder.ROW_MAJOR

    def planes(self, like: Sequence[Plane]) -> tuple[Plane, ...]:
        """The contents of planes of one layer, keys before values, as they lie here.

        Raises:
            UnreadableGeometry: they do not fit, or blocks overlap.
        """
        channels = [plane.counts.channels for plane in like]
        item_bytes = like[0].item_bytes
        extents: dict[Axis, int] = {"head": self.heads, "token": self.tokens}
        strides = dense_strides(self.axes, extents, channels, item_bytes)
        found = []
        for number, plane in enumerate(like):
            token, channel, tile = strides["token"], strides["channel"], None
            if self.key_order is not KeyOrder.ROW_MAJOR:
                token, channel, tile = strides_of_order(
                    self.key_order, plane.content, self.tokens, plane.counts.channels, item_bytes
                )
            found.append(
                replace(
                    plane,
                    address=self.address + number * strides.get("kv", 0),
                    strides_bytes=Strides(
                        self.stride_bytes, strides.get("head", 0), token, channel
                    ),
                    counts=Counts(self.blocks, self.heads, self.tokens, plane.counts.channels),
                    first_head=self.first_head,
                    memory=self.memory,
                    tile=tile,
                )
            )
        return tuple(found)


def row_bytes(planes: Sequence[Plane]) -> int:
    """Returns the bytes of one token of one head, in all contents of a layer."""
    return sum(plane.counts.channels * plane.item_bytes for plane in planes)


def block_bytes(planes: Sequence[Plane]) -> int:
    """Returns the bytes of a layer's block, in all contents, without gaps."""
    return sum(prod(plane.counts[1:]) * plane.item_bytes for plane in planes)


def are_split(planes: Sequence[Plane]) -> bool:
    """True if the values of all blocks lie behind the keys of all: split K/V."""
    starts = [plane.address for plane in planes]
    first = planes[0]
    reach = first.strides_bytes.block * first.counts.blocks
    return len(planes) > 1 and max(starts) - min(starts) >= reach


def tells_states(layout: str | None, *, names_regions: bool, has_heads: bool) -> bool:
    """True if regions have the strides of states: inside blocks, those of latents (from 0.30)."""
    return layout in LAYER_BY_LAYER or (names_regions and not has_heads)
