"""Every layout is a choice of strides: the named ones, as orders of axes.

For geometries that are described and not registered: what a peer states in its
handshake, a host mirror, a test's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Literal

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.order import KeyOrder
from kvpatch.geometry.plane import Content, Counts, Plane, Strides

Axis = Literal["layer", "kv", "block", "head", "token", "channel"]


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
    axes: tuple[Axis, Axis, Axis, Axis, Axis, Axis]
    key_order: KeyOrder = KeyOrder.ROW_MAJOR

    def planes(
        self,
        sizes: CacheSizes,
        address: int,
        memory: Memory,
        layers: Sequence[str] = (),
        first_head: int = 0,
        value_offset_bytes: int | None = None,
    ) -> tuple[Plane, ...]:
        """Planes of all layers, keys before values, in the order of the layers.

        Args:
            address: of the first byte of the first layer.
            layers: their names; by default ``layer.0``, ``layer.1``, ...
            value_offset_bytes: where a layer's values start behind its keys, if kv is
                outside block and the two regions are further apart than they are long
                (kvcached reserves each half for its largest size). Layers then start
                twice that far apart.

        Raises:
            UnreadableGeometry: keys and values of unlike width in a layout that cannot
                hold them, or an offset that a layout has no place for.
        """
        names = tuple(layers) or tuple(f"layer.{number}" for number in range(sizes.layers))
        strides = self._strides(sizes, value_offset_bytes)
        if len(names) != sizes.layers:
            raise UnreadableGeometry(
                f"layout {self.name}: expected {sizes.layers} layer names, found {len(names)}"
            )
        planes = []
        for number, name in enumerate(names):
            for position, (content, width) in enumerate(
                zip(sizes.contents, sizes.widths(), strict=True)
            ):
                token, channel = strides["token"], strides["channel"]
                if self.key_order is KeyOrder.COLUMN_MAJOR and content is Content.KEY:
                    token, channel = channel, sizes.block_tokens * sizes.item_bytes
                planes.append(
                    Plane(
                        layer=name,
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

    def _strides(self, sizes: CacheSizes, value_offset_bytes: int | None) -> dict[Axis, int]:
        """Bytes from one step to the next along each axis."""
        widths = sizes.widths()
        packed = self.axes[-2:] == ("kv", "channel")
        if len(set(widths)) > 1 and not packed:
            raise UnreadableGeometry(
                f"layout {self.name}: expected keys and values of one width, found {widths}; only "
                "packed layouts hold unlike ones"
            )
        extents: dict[Axis, int] = {
            "layer": sizes.layers,
            "kv": len(sizes.contents),
            "block": sizes.blocks,
            "head": sizes.heads,
            "token": sizes.block_tokens,
            "channel": sizes.channels,
        }
        strides: dict[Axis, int] = {}
        step = sizes.item_bytes
        for axis in reversed(self.axes):
            strides[axis] = step
            step *= extents[axis]
            if axis == "kv" and packed:
                step = sum(widths) * sizes.item_bytes
            if axis == "kv" and value_offset_bytes is not None:
                strides["kv"], step = self._apart(strides["kv"], value_offset_bytes, len(widths))
        return strides

    def _apart(self, dense: int, value_offset_bytes: int, contents: int) -> tuple[int, int]:
        if self.axes.index("kv") > self.axes.index("block") or value_offset_bytes < dense:
            raise UnreadableGeometry(
                f"layout {self.name}: expected values in a region of their own, {dense} bytes or "
                f"more behind the keys, found an offset of {value_offset_bytes}"
            )
        return value_offset_bytes, value_offset_bytes * contents


def _layout(
    name: str,
    axes: tuple[Axis, Axis, Axis, Axis, Axis, Axis],
    key_order: KeyOrder = KeyOrder.ROW_MAJOR,
) -> Layout:
    return Layout(name, axes, key_order)


_ALL = (
    # Keys and values in regions of their own: FlashAttention to 0.22.
    _layout("NHD", ("layer", "kv", "block", "token", "head", "channel")),
    _layout("HND", ("layer", "kv", "block", "head", "token", "channel")),
    # Keys and values inside a block: FlashInfer to 0.25, FlashAttention in 0.23 to 0.25.
    _layout("NHD_in_block", ("layer", "block", "kv", "token", "head", "channel")),
    _layout("HND_in_block", ("layer", "block", "kv", "head", "token", "channel")),
    # Keys and values packed: vLLM's own names from 0.29 on; 0.26 to 0.28 have the first two.
    _layout("LBHNC", ("layer", "block", "head", "token", "kv", "channel")),
    _layout("LBNHC", ("layer", "block", "token", "head", "kv", "channel")),
    _layout("LHBNC", ("layer", "head", "block", "token", "kv", "channel")),
    _layout("BLHNC", ("block", "layer", "head", "token", "kv", "channel")),
    _layout("BLNHC", ("block", "layer", "token", "head", "kv", "channel")),
    _layout("BHLNC", ("block", "head", "layer", "token", "kv", "channel")),
    # kvcached: halves far apart (value_offset_bytes), or one block of all layers together.
    _layout("kvcached_split_half", ("layer", "kv", "block", "token", "head", "channel")),
    _layout("kvcached_contiguous", ("block", "layer", "kv", "token", "head", "channel")),
    # The CPU backend's vector kernels: split to 0.22, one piece per block and head after it.
    _layout(
        "CPU_split", ("layer", "kv", "block", "head", "token", "channel"), KeyOrder.COLUMN_MAJOR
    ),
    _layout(
        "CPU_packed", ("layer", "block", "head", "kv", "token", "channel"), KeyOrder.COLUMN_MAJOR
    ),
    # TPU: heads K0 V0 K1 V1 ...
    _layout("TPU", ("layer", "block", "token", "head", "kv", "channel")),
)

LAYOUTS = MappingProxyType({layout.name: layout for layout in _ALL})
"""Every named layout by its name."""


def named_layout(name: str) -> Layout:
    """The layout of that name.

    Raises:
        UnreadableGeometry: there is none; the message lists those there are.
    """
    try:
        return LAYOUTS[name]
    except KeyError:
        raise UnreadableGeometry(
            f"unknown layout {name!r}: expected one of {', '.join(LAYOUTS)}"
        ) from None


def host_mirror(planes: Sequence[Plane], address: int) -> tuple[Plane, ...]:
    """The same planes in host memory, at the same distances from each other.

    What a device that cannot be registered is copied into: a mirror is the device's
    bytes one to one, gaps between planes included, so that one plan serves both.
    """
    if not planes:
        return ()
    lowest = min(plane.span()[0] for plane in planes)
    return tuple(
        replace(plane, address=plane.address - lowest + address, memory=Memory("DRAM"))
        for plane in planes
    )


def dense_plane(plane: Plane, address: int) -> Plane:
    """A plane of the same content and counts, without gaps, blocks outermost.

    Axes inside a block keep the order that their strides have; a staging pool and a
    host buffer hold blocks like this.
    """
    inner = sorted(
        ("head", "token", "channel"), key=lambda axis: int(getattr(plane.strides_bytes, axis))
    )
    counts = {
        "head": plane.counts.heads,
        "token": plane.counts.block_tokens,
        "channel": plane.counts.channels,
    }
    strides, step = {}, plane.item_bytes
    for axis in inner:
        strides[axis] = step
        step *= counts[axis]
    block = prod(counts.values()) * plane.item_bytes
    return replace(
        plane,
        address=address,
        strides_bytes=Strides(block=block, **strides),
    )
