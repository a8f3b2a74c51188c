"""Slices of a peer's regions: a layer's blocks where the whole cache of that layout has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.geometry.layout_strides import NAMED_LAYOUTS, DenseBlocks, block_axes
from kvpatch.geometry.plane import Plane, Strides
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.peer.block_shapes import BlockShape, Piece
from kvpatch.peer.named_regions import NamedRegions
from tests.geometry.whole_caches import CacheSizes, named_layout

pytestmark = pytest.mark.patching

MEMORY = Memory("VRAM")
START = 1 << 20


def _regions(layout: str, sizes: CacheSizes) -> list[tuple[int, int, int]]:
    """(address, bytes of a block, stride) of each region, by the rules of the release."""
    page = sizes.block_tokens * sizes.heads * 2 * sizes.channels * sizes.item_bytes
    if layout in ("LBHNC", "LBNHC"):
        return [(START + i * sizes.blocks * page, page, page) for i in range(sizes.layers)]
    if layout == "LHBNC":
        head = page // sizes.heads
        return [
            (START + i * sizes.blocks * head, head, head) for i in range(sizes.layers * sizes.heads)
        ]
    if layout == "BLHNC":
        return [(START + i * page, page, sizes.layers * page) for i in range(sizes.layers)]
    return [(START, sizes.layers * page, sizes.layers * page)]


def _by_head(planes: tuple[Plane, ...]) -> dict[object, tuple[int, Strides]]:
    """How each head of each layer lies, however planes divide the heads."""
    return {
        (plane.layer, plane.content, plane.first_head + head): (
            plane.address + head * plane.strides_bytes.head,
            plane.strides_bytes._replace(head=0),
        )
        for plane in planes
        for head in range(plane.counts.heads)
    }


_SMALL = st.integers(1, 4)


@given(
    st.sampled_from(sorted(NAMED_LAYOUTS)),
    st.builds(CacheSizes, st.integers(2, 4), _SMALL, _SMALL, _SMALL, _SMALL, _SMALL),
)
def test_every_head_is_where_the_whole_cache_has_it(layout: str, sizes: CacheSizes) -> None:
    layers = "abcd"[: sizes.layers]
    whole = named_layout(layout).planes(sizes, START, MEMORY, layers)
    places = _regions(layout, sizes)
    stated = NamedRegions(layout, tuple(length for _, length, _ in places), None)
    shape = BlockShape(0, sizes.heads, sizes.block_tokens)
    blocks = {
        name: Piece(whole[2 * number : 2 * number + 2], 0, block_axes(layout), shape)
        for number, name in enumerate(layers)
    }
    pieces = stated.pieces([(name,) for name in layers], [layers], blocks)

    found = tuple(
        plane
        for name in layers
        for piece in pieces[name]
        for plane in DenseBlocks(
            places[piece.region][0] + piece.offset_bytes,
            places[piece.region][2],
            piece.axes,
            sizes.blocks,
            piece.shape.heads,
            piece.shape.tokens,
            piece.shape.first_head,
            MEMORY,
        ).planes(piece.members)
    )

    assert _by_head(found) == _by_head(whole)
