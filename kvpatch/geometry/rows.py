"""Blocks of all layers that lie in one row: a block's bytes of every layer are neighbours.

kvcached's contiguous layout is such a row for each kernel block: layer by layer, each
with its keys and values, in ``[blocks, layers, K/V, tokens, heads, channels]`` or, packed,
``[blocks, layers, heads, tokens, K and V]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.plane import Content, Counts, Plane, Strides
from kvpatch.geometry.segments import Int64Array, Segments

PartAxis = Literal["kv", "head", "token", "channel"]
#: Axes of a layer's part, from the outermost to the innermost.
PartAxes = tuple[PartAxis, ...]

#: Every order in which a layer's part of a row may lie.
PART_AXES: tuple[PartAxes, ...] = (
    ("kv", "token", "head", "channel"),
    ("kv", "head", "token", "channel"),
    ("token", "head", "kv", "channel"),
    ("head", "token", "kv", "channel"),
    ("token", "channel"),
)


@dataclass(frozen=True)
class Row:
    """Where the rows of one allocation lie.

    Attributes:
        layers: as they follow one another in a row.
        axes: of each layer's part.
        address: of the first row.
        part_bytes: of each layer in a row, in their order.
        rows: how many there are, one behind the other.
    """

    layers: tuple[str, ...]
    axes: PartAxes
    address: int
    part_bytes: tuple[int, ...]
    rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a block of all layers."""
        return sum(self.part_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


def read_row(layers: Mapping[str, Sequence[Plane]], order: Sequence[str] | None = None) -> Row:
    """The rows that these layers' planes are.

    Args:
        order: in which they are to follow one another; None for that of their numbers.

    Raises:
        UnreadableGeometry: their parts overlap, leave gaps, are strided in unlike or
            unknown ways, or follow one another in another order.
    """
    names = sorted(layers, key=lambda name: layers[name][0].address)
    first = layers[names[0]]
    address = first[0].address
    parts: list[int] = []
    axes = part_axes(first)
    for name in names:
        planes = layers[name]
        expected = part_planes(planes[0], address + sum(parts), axes, planes[0].counts, len(planes))
        if _places(planes) != _places(expected):
            raise UnreadableGeometry(
                f"layer {name!r}: expected it in a row of all layers at {address + sum(parts):#x}, "
                f"its axes {axes} from the outermost to the innermost, found "
                f"{', '.join(map(str, planes))}"
            )
        parts.append(part_bytes(planes[0].counts, len(planes), planes[0].item_bytes))
    counts = {planes[0].counts.blocks for planes in layers.values()}
    strides = {plane.strides_bytes.block for planes in layers.values() for plane in planes}
    if counts != {first[0].counts.blocks} or strides != {sum(parts)}:
        raise UnreadableGeometry(
            f"layers {', '.join(names)}: expected rows of {sum(parts)} bytes one behind the other, "
            f"found {sorted(counts)} of them every {sorted(strides)} bytes"
        )
    expected_order = in_order(names) if order is None else list(order)
    if names != expected_order:
        raise UnreadableGeometry(
            f"layers lie in the order {', '.join(names)} in a row of all layers: expected "
            f"{', '.join(expected_order)}"
        )
    return Row(tuple(names), axes, address, tuple(parts), counts.pop())


def read_packed_row(groups: Sequence[Mapping[str, Sequence[Plane]]]) -> Row:
    """The rows that each of several groups divides in a way of its own, from their beginning.

    The group with the most bytes fills them; of the others' the end may be left over.

    Args:
        groups: each with its layers in the order in which they are to follow one another.

    Raises:
        UnreadableGeometry: one group's layers lie otherwise.
    """
    sizes = [sum(_part_bytes_of(planes) for planes in group.values()) for group in groups]
    widest = groups[sizes.index(max(sizes))]
    row = read_row(widest, tuple(widest))
    for group in groups:
        address = row.address
        for name, planes in group.items():
            like = planes[0]
            expected = part_planes(
                like, address, row.axes, like.counts, len(planes), block_stride_bytes=row.row_bytes
            )
            is_in_row = like.strides_bytes.block == row.row_bytes and like.counts.blocks == row.rows
            if not is_in_row or _places(planes) != _places(expected):
                raise UnreadableGeometry(
                    f"layer {name!r}: expected it in one of {row.rows} rows of {row.row_bytes} "
                    f"bytes at {address:#x}, its axes {row.axes} from the outermost to the "
                    f"innermost, found {', '.join(map(str, planes))}"
                )
            address += _part_bytes_of(planes)
    return row


def _part_bytes_of(planes: Sequence[Plane]) -> int:
    return part_bytes(planes[0].counts, len(planes), planes[0].item_bytes)


def shares_place(first: Sequence[Plane], other: Sequence[Plane], axes: PartAxes) -> bool:
    """Whether a layer's blocks are the same bytes as another's, laid out alike inside.

    Heads, tokens and channels of a block may be others, if they come to as many bytes.
    """
    one, two = first[0], other[0]
    expected = part_planes(two, one.address, axes, two.counts, len(other), one.strides_bytes.block)
    bytes_of = [part_bytes(p[0].counts, len(p), p[0].item_bytes) for p in (first, other)]
    return (
        len(first) == len(other)
        and bytes_of[0] == bytes_of[1]
        and one.counts.blocks == two.counts.blocks
        and {plane.strides_bytes.block for plane in other} == {one.strides_bytes.block}
        and _places(other) == _places(expected)
    )


def part_axes(planes: Sequence[Plane]) -> PartAxes:
    """How a layer's part of a row lies, by its strides.

    Raises:
        UnreadableGeometry: in no way that is known here.
    """
    first = planes[0]
    for axes in PART_AXES:
        if ("kv" in axes) != (len(planes) == 2):
            continue
        expected = part_planes(first, first.address, axes, first.counts, len(planes))
        if _places(planes) == _places(expected):
            return axes
    raise UnreadableGeometry(
        f"{', '.join(map(str, planes))}: expected a block in one piece, its axes in one of the "
        f"orders {', '.join('-'.join(axes) for axes in PART_AXES)}"
    )


def part_planes(
    like: Plane,
    address: int,
    axes: PartAxes,
    counts: Counts,
    contents: int,
    block_stride_bytes: int | None = None,
) -> tuple[Plane, ...]:
    """Planes of a layer whose block is one dense piece at `address` in the first row.

    Args:
        like: a plane of the layer, for all that the other arguments do not say.
        contents: 2 for keys and values, 1 for a latent.
    """
    extents = {
        "kv": contents,
        "head": counts.heads,
        "token": counts.block_tokens,
        "channel": counts.channels,
    }
    strides = dict.fromkeys(extents, 0)
    step = like.item_bytes
    for axis in reversed(axes):
        strides[axis] = step
        step *= extents[axis]
    inner = Strides(
        like.strides_bytes.block if block_stride_bytes is None else block_stride_bytes,
        strides["head"],
        strides["token"],
        strides["channel"],
    )
    found = (Content.KEY, Content.VALUE) if contents == 2 else (like.content,)
    return tuple(
        Plane(
            layer=like.layer,
            content=content,
            address=address + number * strides["kv"],
            strides_bytes=inner,
            counts=counts,
            item_bytes=like.item_bytes,
            first_head=like.first_head,
            memory=like.memory,
            is_whole=like.is_whole,
        )
        for number, content in enumerate(found)
    )


def _places(planes: Sequence[Plane]) -> list[tuple[Content, int, list[int]]]:
    """Where the elements of a block lie; a stride along an axis of one element says nothing."""
    return [
        (
            plane.content,
            plane.address,
            [
                stride if count > 1 else 0
                for stride, count in zip(plane.strides_bytes[1:], plane.counts[1:], strict=True)
            ],
        )
        for plane in planes
    ]


def part_bytes(counts: Counts, contents: int, item_bytes: int) -> int:
    """Bytes of a layer in a row."""
    return contents * prod((counts.heads, counts.block_tokens, counts.channels)) * item_bytes


def pair_rows(segments: Segments) -> tuple[Int64Array, Int64Array] | None:
    """(remote block, local block) of segments, of blocks that hold the same tokens on both sides.

    None where one begins elsewhere in a block here than there. Where all begin inside their
    blocks, as a sliding window does, what is before them comes along: lists of blocks to fill
    begin with a whole one.
    """
    if (segments.remote_offset != segments.local_offset).any():
        return None
    return segments.remote_block, segments.local_block


def places_of(groups: Sequence[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """The layers at each place of a row: the first ones of all groups, the second ones, ...

    A block is one group's, so that layers of several groups can have one place. The longest
    group has a layer at every place, which comes first there.
    """
    ordered = sorted((in_order(group) for group in groups), key=len, reverse=True)
    return tuple(
        tuple(group[place] for group in ordered if place < len(group))
        for place in range(len(ordered[0]) if ordered else 0)
    )


def in_order(layers: Iterable[str]) -> list[str]:
    """Layers by the numbers in their names, so that both ends have one order of them."""
    return sorted(layers, key=_numbers)


def _numbers(name: str) -> tuple[tuple[int, str], ...]:
    parts = re.split(r"(\d+)", name)
    return tuple((int(p), "") if p.isdigit() else (-1, p) for p in parts)
