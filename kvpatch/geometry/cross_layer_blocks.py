"""Cross-layer blocks: a block's bytes of every layer are neighbours.

kvcached's contiguous layout is such an allocation, of kernel blocks: layer by layer, each with
its keys and values, in ``[blocks, layers, K/V, tokens, heads, head_dim]`` or, packed,
``[blocks, layers, heads, tokens, K and V]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.layout_strides import (
    HND,
    NHD,
    PACKED_HND,
    PACKED_NHD,
    WITHOUT_HEADS,
    Axes,
    DenseBlocks,
    block_bytes,
)
from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.segments import Int64Array, Segments

#: Every order in which a layer may lie in a cross-layer block.
LAYER_AXES: tuple[Axes, ...] = (NHD, HND, PACKED_NHD, PACKED_HND, WITHOUT_HEADS)


@dataclass(frozen=True)
class CrossLayerBlocks:
    """The places of one allocation's blocks, which lie one behind the other.

    Attributes:
        layers: as they follow one another in a block.
        address: of the first block.
        layer_bytes: of each layer in a block, in their order.
    """

    layers: tuple[str, ...]
    axes: Axes
    address: int
    layer_bytes: tuple[int, ...]
    blocks: int

    @property
    def block_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def size_bytes(self) -> int:
        return self.blocks * self.block_bytes


def read_cross_layer_blocks(groups: Sequence[Mapping[str, Sequence[Plane]]]) -> CrossLayerBlocks:
    """The blocks that each of several groups divides in a way of its own, from their beginning.

    The group with the most bytes fills them; of the others' the end may be left over.

    Args:
        groups: each with its layers in the order in which they are to follow one another.

    Raises:
        UnreadableGeometry: layers overlap, leave gaps, are strided in several or unknown ways, or
            follow one another in another order.
    """
    sizes = [sum(block_bytes(planes) for planes in group.values()) for group in groups]
    widest = groups[sizes.index(max(sizes))]
    first = next(iter(widest.values()))
    found = CrossLayerBlocks(
        tuple(widest),
        layer_axes(first),
        first[0].address,
        tuple(block_bytes(planes) for planes in widest.values()),
        first[0].counts.blocks,
    )
    for group in groups:
        address = found.address
        for name, planes in group.items():
            is_in_block = all(
                plane.strides_bytes.block == found.block_bytes
                and plane.counts.blocks == found.blocks
                for plane in planes
            )
            if not is_in_block or not _are_dense(planes, found.axes, address):
                raise UnreadableGeometry(
                    f"layer {name!r}: expected it in one of {found.blocks} blocks of "
                    f"{found.block_bytes} bytes at {address:#x}, its axes {found.axes} from the "
                    f"outermost to the innermost, found {', '.join(map(str, planes))}"
                )
            address += block_bytes(planes)
    return found


def shares_place(first: Sequence[Plane], other: Sequence[Plane], axes: Axes) -> bool:
    """True if a layer's blocks are the same bytes as another's, laid out alike inside.

    Heads, tokens and channels of a block may be others, if they come to as many bytes.
    """
    one, two = first[0], other[0]
    return (
        len(first) == len(other)
        and block_bytes(first) == block_bytes(other)
        and one.counts.blocks == two.counts.blocks
        and {plane.strides_bytes.block for plane in other} == {one.strides_bytes.block}
        and _are_dense(other, axes, one.address)
    )


def layer_axes(planes: Sequence[Plane]) -> Axes:
    """Returns the order in which a layer lies in a block, by its strides.

    Raises:
        UnreadableGeometry: in no way that is known here.
    """
    for axes in LAYER_AXES:
        if ("kv" in axes) != (len(planes) == 2):
            continue
        if _are_dense(planes, axes, planes[0].address):
            return axes
    raise UnreadableGeometry(
        f"{', '.join(map(str, planes))}: expected a block in one piece, its axes in one of the "
        f"orders {', '.join('-'.join(axes) for axes in LAYER_AXES)}"
    )


def _are_dense(planes: Sequence[Plane], axes: Axes, address: int) -> bool:
    """True if a layer's part of a block is one dense piece at an address of the first block."""
    first = planes[0]
    if len({plane.counts for plane in planes}) > 1:  # keys and values of one width only
        return False
    dense = DenseBlocks(
        address,
        first.strides_bytes.block,
        axes,
        first.counts.blocks,
        first.counts.heads,
        first.counts.block_tokens,
        first.first_head,
        first.memory,
    )
    return _places(planes) == _places(dense.planes(planes))


def _places(planes: Sequence[Plane]) -> list[tuple[Content, int, list[int]]]:
    """Returns where a block's elements lie; a stride along an axis of one element says nothing."""
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


def pair_whole_blocks(segments: Segments) -> tuple[Int64Array, Int64Array] | None:
    """(remote block, local block) of segments, of blocks that hold the same tokens on both sides.

    None where one begins elsewhere in a block here than there. Where all begin inside their
    blocks, as a sliding window does, what is before them comes along: lists of blocks to fill
    begin with a whole one.
    """
    if (segments.remote_offset != segments.local_offset).any():
        return None
    return segments.remote_block, segments.local_block


def places_of(groups: Sequence[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """The layers at each place of a block: the first ones of all groups, the second ones, ...

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

    def numbers(name: str) -> list[tuple[int, str]]:
        return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]

    return sorted(layers, key=numbers)
