"""Where the items of one token's slot lie, in every plane of a cache at once.

A slot is a token's place. The witness takes the same slots of all layers out of the cache twice, so
that what depends on the cache alone is worked out once: an item's place behind the beginning of its
plane's row. What depends on the token is one number for each plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import Int64Array


class Alike(NamedTuple):
    """Planes in a row that have as many items of a token.

    Attributes:
        planes, items: from the first to past the last, in the order of the gather.
    """

    planes: slice
    items: slice


class Table(NamedTuple):
    """The block table of a plane: which one it is, and the tokens of a block of it."""

    number: int
    block_tokens: int


@dataclass(frozen=True)
class SlotGather:
    """The items of one token in every plane of a cache, counted from one address.

    Attributes:
        planes: in the order of what is gathered: those of as many items follow one another.
        tables: by plane the block table, of whose blocks the plane's are parts.
        plane_of_item: [item] the plane that an item is of.
        inner: [item] how many items lie between the beginning of a token's row and this one.
        alike: which of them have as many items.
    """

    planes: tuple[Plane, ...]
    tables: tuple[Table, ...]
    address: int
    plane_of_item: Int64Array
    inner: Int64Array
    alike: tuple[Alike, ...]

    @property
    def item_bytes(self) -> int:
        """Of one item of every plane."""
        return self.planes[0].item_bytes

    def starts(self, position: int, last_blocks: Sequence[int]) -> Int64Array | None:
        """[plane] where the token's row begins, in items; None where a plane has no such block.

        Args:
            position: of the token in its request.
            last_blocks: by table the block that holds the token.
        """
        found = []
        for plane, table in zip(self.planes, self.tables, strict=True):
            size = plane.counts.block_tokens
            part, token = divmod(position % table.block_tokens, size)
            kernel_block = last_blocks[table.number] * (table.block_tokens // size) + part
            if not 0 <= kernel_block < plane.counts.blocks:
                return None
            found.append(plane.address + plane.byte_offset(kernel_block, 0, token, 0))
        return (np.array(found, dtype=np.int64) - self.address) // self.item_bytes


def slot_gather(planes: Sequence[Plane], tables: Sequence[Table], address: int) -> SlotGather:
    """The gather of these planes, which lie behind an address.

    Args:
        tables: by plane its block table.

    Raises:
        UnreadableGeometry: items have several sizes, lie askew, or a table's blocks are no whole
            number of a plane's.
    """
    _check(planes, tables, address)
    order = sorted(range(len(planes)), key=lambda n: _items_of(planes[n]))
    ordered = tuple(planes[n] for n in order)
    counts = np.array([_items_of(plane) for plane in ordered])
    return SlotGather(
        ordered,
        tuple(tables[n] for n in order),
        address,
        np.repeat(np.arange(len(ordered)), counts).astype(np.int64),
        np.concatenate([_inner(plane) for plane in ordered]),
        tuple(_alike(counts.tolist())),
    )


def _check(planes: Sequence[Plane], tables: Sequence[Table], address: int) -> None:
    size = planes[0].item_bytes
    for plane, (_, tokens) in zip(planes, tables, strict=True):
        places = (plane.address - address, *(stride for _, stride in plane.axes))
        if plane.item_bytes != size or any(place % size for place in places):
            raise UnreadableGeometry(f"{plane}: expected all of it in whole items of {size} bytes")
        if tokens % plane.counts.block_tokens:
            raise UnreadableGeometry(f"{plane}: expected blocks that make up {tokens} tokens")


def _items_of(plane: Plane) -> int:
    return plane.counts.heads * plane.counts.channels


def _inner(plane: Plane) -> Int64Array:
    heads, channels = np.indices((plane.counts.heads, plane.counts.channels))
    apart = plane.byte_offset(0, heads, 0, channels)
    found: Int64Array = (apart // plane.item_bytes).reshape(-1).astype(np.int64)
    return found


def _alike(counts: Sequence[int]) -> list[Alike]:
    found, plane, item = [], 0, 0
    for count, group in groupby(counts):
        planes = len(list(group))
        items = slice(item, item + planes * count)
        found.append(Alike(slice(plane, plane + planes), items))
        plane, item = plane + planes, items.stop
    return found
