"""Reads a registered tensor into planes, or refuses it with what it looks like."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NoReturn

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.dimension_order import DimensionOrder, KeyOrder
from kvpatch.geometry.layout_strides import strides_of_order
from kvpatch.geometry.plane import (
    Content,
    Counts,
    Plane,
    Strides,
    TensorFacts,
    Tile,
    axes_nest,
    extent_bytes,
)


def read_planes(
    layer: str,
    facts: TensorFacts,
    order: DimensionOrder,
    key_order: KeyOrder = KeyOrder.ROW_MAJOR,
    first_head: int = 0,
) -> tuple[Plane, ...]:
    """The planes that a tensor holds: keys and values, or the one content that it has.

    Args:
        order: what each dimension of ``facts.shape`` means.
        key_order: COLUMN_MAJOR for the CPU backend's vector kernels, TILED for its tiles.
        first_head: the global number of the tensor's first KV head; contents without
            heads ignore it.

    Raises:
        UnreadableGeometry: the tensor overlaps itself, is empty, leaves its storage, or
            is not what the order says. The message has layer, shape and strides.
    """
    reading = _Reading(layer, facts, order, first_head)
    reading.check()
    if key_order is KeyOrder.ROW_MAJOR:
        return reading.row_major()
    return reading.one_piece(key_order)


@dataclass(frozen=True)
class _Reading:
    layer: str
    facts: TensorFacts
    order: DimensionOrder
    first_head: int

    def refuse(self, expected: str, found: str) -> NoReturn:
        raise UnreadableGeometry(
            f"layer {self.layer!r}: expected {expected}, found {found}: shape {self.facts.shape}, "
            f"strides {self.facts.strides} elements of {self.facts.item_bytes} bytes, dimensions "
            f"{self.order.dimensions}"
        )

    def check(self) -> None:
        """Checks the rules that hold for every order: dimensions, sizes, strides, storage."""
        facts, names = self.facts, self.order.dimensions
        if not len(facts.shape) == len(facts.strides) == len(names):
            self.refuse(
                f"{len(names)} dimensions",
                f"{len(facts.shape)} sizes and {len(facts.strides)} strides",
            )
        if facts.item_bytes < 1:
            self.refuse("elements of 1 byte or more", f"{facts.item_bytes}")
        for name, size in zip(names, facts.shape, strict=True):
            if size < 1:
                self.refuse(f"a {name} dimension of 1 or more", f"{size} {name}s")
        if min(facts.strides) < 0:
            self.refuse("no negative stride", f"{min(facts.strides)}")
        axes = [
            (size, stride * facts.item_bytes)
            for size, stride in zip(facts.shape, facts.strides, strict=True)
        ]
        if not axes_nest(axes, facts.item_bytes):
            self.refuse("strides that step over one another", "overlapping strides")
        end = facts.address + extent_bytes(axes, facts.item_bytes)
        storage_end = facts.storage_address + facts.storage_bytes
        if facts.address < facts.storage_address or end > storage_end:
            self.refuse(
                f"a tensor inside its storage at {facts.storage_address:#x} to {storage_end:#x}",
                f"{facts.address:#x} to {end:#x}",
            )
        if "kv" in names and self.size("kv") != 2:
            self.refuse("a kv dimension of 2", f"{self.size('kv')}")
        if "packed_head" in names and self.size("packed_head") % 2:
            self.refuse("a key head for each value head", f"{self.size('packed_head')} heads")
        if "packed" in names:
            self.packed_channels()

    def row_major(self) -> tuple[Plane, ...]:
        """Keys and values token by token, or the one content."""
        names = self.order.dimensions
        if "state" in names:
            return (self.state(),)
        channel = self.stride("packed" if "packed" in names else "channel")
        strides = self.strides(self.stride("token"), channel)
        head = self.first_head
        if "slot" in names:  # of this rank's heads, whichever these are
            first = head * self.size("slot")
            return (self.plane(Content.SLOT, 0, strides, self.size("channel"), first),)
        if "packed" in names:
            keys, values = self.packed_channels()
            apart = keys * channel
        else:
            keys = values = self.size("channel")
            apart = self.stride("kv" if "kv" in names else "packed_head")
        if not {"kv", "packed", "packed_head"} & set(names):
            first = head if "head" in names else 0
            return (self.plane(Content.LATENT, 0, strides, keys, first),)
        return (
            self.plane(Content.KEY, 0, strides, keys, head),
            self.plane(Content.VALUE, apart, strides, values, head),
        )

    def one_piece(self, key_order: KeyOrder) -> tuple[Plane, ...]:
        """Keys by column or in tiles, and values, each one piece per block and head."""
        names = self.order.dimensions
        what = "column-major keys" if key_order is KeyOrder.COLUMN_MAJOR else "keys in tiles"
        item, tokens = self.facts.item_bytes, self.size("token")
        if "head" not in names or not {"kv", "packed"} & set(names):
            self.refuse(f"keys and values with a head dimension, for {what}", "neither")
        last = "packed" if "packed" in names else "channel"
        row = self.size(last) * item
        if self.stride(last) != item or (tokens > 1 and self.stride("token") != row):
            self.refuse(
                f"tokens of a block and head in one piece, for {what}",
                f"strides of {self.stride('token')} bytes by token, {self.stride(last)} by channel",
            )
        if last == "packed":
            channels, value_channels = self.packed_channels()
            if channels != value_channels:
                self.refuse("keys as wide as values", f"{channels} and {value_channels} channels")
            apart = tokens * channels * item
        else:
            channels, apart = self.size("channel"), self.stride("kv")
        found = []
        for content, offset in ((Content.KEY, 0), (Content.VALUE, apart)):
            token, channel, tile = strides_of_order(key_order, content, tokens, channels, item)
            strides = self.strides(token, channel)
            found.append(self.plane(content, offset, strides, channels, self.first_head, tile))
        return tuple(found)

    def state(self) -> Plane:
        """Reads one run of opaque elements per block, as a block of one token."""
        item = self.facts.item_bytes
        block = self.order.dimensions.index("block")
        inner = [
            (size, stride * item)
            for position, (size, stride) in enumerate(
                zip(self.facts.shape, self.facts.strides, strict=True)
            )
            if position != block
        ]
        elements = prod(self.facts.shape) // self.size("block")
        if extent_bytes(inner, item) != elements * item:
            self.refuse("a state in one piece per block", "one with gaps")
        strides = Strides(self.stride("block"), elements * item, elements * item, item)
        counts = Counts(self.size("block"), 1, 1, elements)
        address, memory = self.facts.address, self.facts.memory
        return Plane(self.layer, Content.STATE, address, strides, counts, item, 0, memory)

    def plane(
        self,
        content: Content,
        offset: int,
        strides: Strides,
        channels: int,
        first_head: int,
        tile: Tile | None = None,
    ) -> Plane:
        """A plane ``offset`` bytes behind the tensor's first element."""
        facts = self.facts
        counts = Counts(self.size("block"), self.heads()[0], self.size("token"), channels)
        return Plane(
            self.layer,
            content,
            facts.address + offset,
            strides,
            counts,
            facts.item_bytes,
            first_head,
            facts.memory,
            tile=tile,
        )

    def strides(self, token: int, channel: int) -> Strides:
        return Strides(self.stride("block"), self.heads()[1], token, channel)

    def heads(self) -> tuple[int, int]:
        """Returns how many heads there are, and the bytes from one to the next."""
        for name in ("head", "slot"):
            if name in self.order.dimensions:
                return self.size(name), self.stride(name)
        if "packed_head" in self.order.dimensions:
            return self.size("packed_head") // 2, 2 * self.stride("packed_head")
        return 1, 0

    def packed_channels(self) -> tuple[int, int]:
        """Widths of keys and of values in a packed dimension."""
        whole = self.size("packed")
        keys, values = self.order.key_channels, self.order.value_channels
        if keys is None:
            keys = whole - values if values is not None else whole // 2
        if values is None:
            values = whole - keys if self.order.key_channels is not None else keys
        if keys < 1 or values < 1 or keys + values != whole:
            self.refuse(
                f"a packed dimension of key and value channels, {self.order.key_channels} and "
                f"{self.order.value_channels} where stated and else alike",
                f"{whole}",
            )
        return keys, values

    def size(self, name: str) -> int:
        return self.facts.shape[self.order.dimensions.index(name)]

    def stride(self, name: str) -> int:
        """Returns a dimension's stride in bytes; 0 for a dimension that the tensor lacks."""
        if name not in self.order.dimensions:
            return 0
        return self.facts.strides[self.order.dimensions.index(name)] * self.facts.item_bytes
