"""Whole caches in a layout each: what an engine allocates, for tests and benchmarks.

The layouts of every generation by name, as orders of axes of a cache of all layers; all of a
layout's arithmetic is :func:`~kvpatch.geometry.layout_strides.dense_strides`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import NAMED_LAYOUTS, Axes, dense_strides
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides


@dataclass(frozen=True)
class CacheSizes:
    """How much of everything one rank's caches hold.

    Attributes:
        channels: of a key, or of the only content.
        value_channels: of a value, where it differs; packed layouts alone allow that.
        contents: KEY and VALUE, or one other content.
    """

    layers: int
    blocks: int
    heads: int
    block_tokens: int
    channels: int
    item_bytes: int
    value_channels: int | None = None
    contents: tuple[Content, ...] = (Content.KEY, Content.VALUE)

    def widths(self) -> tuple[int, ...]:
        """Channels of each content."""
        if len(self.contents) == 2 and self.value_channels is not None:
            return self.channels, self.value_channels
        return (self.channels,) * len(self.contents)

    def total_bytes(self) -> int:
        """Bytes of all layers without padding."""
        items = self.layers * self.blocks * self.heads * self.block_tokens * sum(self.widths())
        return items * self.item_bytes


@dataclass(frozen=True)
class Layout:
    """Axes from the outermost to the innermost, densely packed.

    Attributes:
        axes: all six; keys and values are packed into one row where kv comes right
            before channel.
        key_order: COLUMN_MAJOR swaps token and channel for the keys.
    """

    name: str
    axes: Axes
    key_order: KeyOrder = KeyOrder.ROW_MAJOR

    def planes(
        self,
        sizes: CacheSizes,
        address: int,
        memory: Memory,
        first_head: int = 0,
        value_offset_bytes: int | None = None,
    ) -> tuple[Plane, ...]:
        """Planes of all layers (``layer.0``, ...), keys before values, in the order of the layers.

        Args:
            address: of the first byte of the first layer.
            value_offset_bytes: where a layer's values start behind its keys, if kv is
                right inside layer and the two regions are further apart than they are long
                (kvcached reserves each half for its largest size). Layers then start
                twice that far apart.

        Raises:
            UnreadableGeometry: keys and values of unlike width in a layout that cannot
                hold them.
        """
        widths = sizes.widths()
        strides = dense_strides(
            self.axes,
            {
                "layer": sizes.layers,
                "block": sizes.blocks,
                "head": sizes.heads,
                "token": sizes.block_tokens,
            },
            widths,
            sizes.item_bytes,
        )
        if value_offset_bytes is not None:
            if self.axes[:2] != ("layer", "kv") or value_offset_bytes < strides["kv"]:
                raise UnreadableGeometry(f"{self.name}: {value_offset_bytes} do not fit")
            strides.update(kv=value_offset_bytes, layer=2 * value_offset_bytes)
        planes = []
        for number in range(sizes.layers):
            for position, (content, width) in enumerate(zip(sizes.contents, widths, strict=True)):
                token, channel = strides["token"], strides["channel"]
                if self.key_order is KeyOrder.COLUMN_MAJOR and content is Content.KEY:
                    token, channel = channel, sizes.block_tokens * sizes.item_bytes
                planes.append(
                    Plane(
                        layer=f"layer.{number}",
                        content=content,
                        address=address + number * strides["layer"] + position * strides["kv"],
                        strides_bytes=Strides(strides["block"], strides["head"], token, channel),
                        counts=Counts(sizes.blocks, sizes.heads, sizes.block_tokens, width),
                        item_bytes=sizes.item_bytes,
                        first_head=first_head,
                        memory=memory,
                    )
                )
        return tuple(planes)


_ALL = (
    # Keys and values in regions of their own: FlashAttention <= 0.22.
    Layout("NHD", ("layer", "kv", "block", "token", "head", "channel")),
    Layout("HND", ("layer", "kv", "block", "head", "token", "channel")),
    # Keys and values inside a block: FlashInfer <= 0.25, FlashAttention in 0.23 to 0.25.
    Layout("NHD_in_block", ("layer", "block", "kv", "token", "head", "channel")),
    Layout("HND_in_block", ("layer", "block", "kv", "head", "token", "channel")),
    # Keys and values packed: vLLM's own names from 0.29 on; 0.26 to 0.28 have the first two.
    *(Layout(name, axes) for name, axes in NAMED_LAYOUTS.items()),
    # kvcached: halves far apart (value_offset_bytes), or one block of all layers together.
    Layout("kvcached_split_half", ("layer", "kv", "block", "token", "head", "channel")),
    Layout("kvcached_contiguous", ("block", "layer", "kv", "token", "head", "channel")),
    # The CPU backend's vector kernels: split <= 0.22, one piece per block and head after it.
    Layout(
        "CPU_split", ("layer", "kv", "block", "head", "token", "channel"), KeyOrder.COLUMN_MAJOR
    ),
    Layout(
        "CPU_packed", ("layer", "block", "head", "kv", "token", "channel"), KeyOrder.COLUMN_MAJOR
    ),
    # TPU: heads K0 V0 K1 V1 ...
    Layout("TPU", ("layer", "block", "token", "head", "kv", "channel")),
)

LAYOUTS = MappingProxyType({layout.name: layout for layout in _ALL})
"""Every named layout by its name."""


def named_layout(name: str) -> Layout:
    """The layout of that name."""
    return LAYOUTS[name]


def as_array(plane: Plane, buffer: Any, buffer_address: int) -> npt.NDArray[np.uint8]:
    """A plane's bytes as a view [block, head, token, channel, byte of the item].

    Of a tiled plane it is a copy. `buffer_address` is that of the buffer's first byte.
    """
    raw = np.frombuffer(buffer, dtype=np.uint8)
    start, end = plane.span()
    assert buffer_address <= start, f"{plane} begins before {buffer_address:#x}"
    assert end <= buffer_address + raw.size, f"{plane} ends behind {raw.size} bytes"
    sizes, strides = zip(*plane.axes, strict=True)
    view = np.lib.stride_tricks.as_strided(
        raw[start - buffer_address :],
        shape=(*sizes, plane.item_bytes),
        strides=(*strides, 1),
    )
    return view.reshape(*plane.counts, plane.item_bytes)
