"""The layout algebra: strides written out, tensors that they stand for, and every byte once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import (
    BY_COLUMN,
    HND,
    LAYERS_INSIDE_BLOCKS,
    NHD,
    PACKED_HND,
    PACKED_NHD,
    Axes,
    DenseBlocks,
    are_split,
    block_axes,
    block_bytes,
    dense_strides,
    inner_layout,
    layer_by_layer,
)
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides

from .reference import byte_offset
from .whole_caches import CacheSizes, named_layout

pytestmark = pytest.mark.geometry

MEMORY = Memory("VRAM", 1)
# 2 layers, 5 blocks, 3 heads, 4 tokens, 8 channels of 2 bytes.
SIZES = CacheSizes(2, 5, 3, 4, 8, 2)


_BLOCK_AXES = (HND, NHD, PACKED_HND, PACKED_NHD, BY_COLUMN)


@st.composite
def _dense_blocks(draw: st.DrawFn) -> tuple[DenseBlocks, tuple[Plane, ...]]:
    """Blocks of two contents, or of one, and planes of a layer as it lies elsewhere."""
    axes = draw(st.sampled_from(_BLOCK_AXES))
    small = st.integers(1, 5)
    heads, tokens, item = draw(small), draw(small), draw(st.sampled_from((1, 2, 4)))
    contents = draw(st.sampled_from(((Content.KEY, Content.VALUE), (Content.LATENT,))))
    widths = [draw(small)] * len(contents)
    if axes in (PACKED_HND, PACKED_NHD):
        widths = [draw(small) for _ in contents]
    size = heads * tokens * sum(widths) * item
    like = tuple(
        Plane(
            "a",
            content,
            1 << 20,
            Strides(1 << 12, width * item, heads * width * item, item),
            Counts(3, heads, tokens, width),
            item,
            0,
            MEMORY,
        )
        for content, width in zip(contents, widths, strict=True)
    )
    order = KeyOrder.COLUMN_MAJOR if axes == BY_COLUMN else KeyOrder.ROW_MAJOR
    gap = draw(st.integers(0, 9))
    return DenseBlocks(512, size + gap, axes, 3, heads, tokens, 7, MEMORY, order), like


@given(_dense_blocks())
def test_a_dense_block_is_an_array_of_its_axes(drawn):
    """The oracle numbers a dense array's items and takes each content out of it."""
    dense, like = drawn
    widths = [plane.counts.channels for plane in like]
    shape = {"kv": len(like), "head": dense.heads, "token": dense.tokens, "channel": widths[0]}
    if dense.axes[-2:] == ("kv", "channel"):  # one row: keys, then values
        outer = [axis for axis in dense.axes if axis not in ("kv", "channel")]
        items = np.arange(dense.heads * dense.tokens * sum(widths))
        rows = items.reshape([shape[axis] for axis in outer] + [sum(widths)])
        rows = rows if outer == ["head", "token"] else rows.swapaxes(0, 1)
        expected = np.split(rows, np.cumsum(widths)[:-1], axis=-1)
    else:
        items = np.arange(len(like) * dense.heads * dense.tokens * widths[0])
        whole = items.reshape([shape[axis] for axis in dense.axes])
        by_name = np.transpose(
            whole, [dense.axes.index(axis) for axis in ("kv", "head", "token", "channel")]
        )
        expected = list(by_name)
        if dense.key_order is KeyOrder.COLUMN_MAJOR and like[0].content is Content.KEY:
            keys = expected[0].copy()
            flat = keys.reshape(dense.heads, -1)
            expected[0] = np.swapaxes(flat.reshape(dense.heads, widths[0], dense.tokens), 1, 2)
    assert block_bytes(like) == items.size * like[0].item_bytes
    for plane, places in zip(dense.planes(like), expected, strict=True):
        assert (plane.first_head, plane.layer, plane.memory) == (7, "a", MEMORY)
        for block, head, token, channel in np.ndindex(3, *places.shape):
            offset = byte_offset(plane, block, head, token, channel)
            offset += plane.address - dense.address - block * dense.stride_bytes
            assert offset == places[head, token, channel] * plane.item_bytes


def test_only_packed_rows_hold_contents_of_unlike_width() -> None:
    with pytest.raises(UnreadableGeometry, match=r"kv-head-token-channel.*\(8, 6\)"):
        dense_strides(HND, {"head": 2, "token": 4}, (8, 6), 2)


@pytest.mark.parametrize(
    ("name", "inner", "axes"),
    [
        ("LBHNC", "HND", PACKED_HND),
        ("BLHNC", "HND", PACKED_HND),
        ("LBNHC", "NHD", PACKED_NHD),
        ("LHBNC", None, PACKED_HND),  # of one head
        ("BLNHC", None, PACKED_NHD),
        ("BHLNC", None, PACKED_HND),  # of one head
    ],
)
def test_what_a_name_says_of_a_layers_block(name: str, inner: str | None, axes: Axes) -> None:
    assert inner_layout(name) == inner
    assert block_axes(name) == axes
    assert (name in LAYERS_INSIDE_BLOCKS) == name.startswith("B")


def test_names_of_layouts_whose_layers_are_apart() -> None:
    assert [layer_by_layer(x, like) for x in ("HND", "NHD") for like in ("NHD", "BLNHC")] == [
        "HND", "LBHNC", "NHD", "LBNHC",
    ]  # fmt: skip
    assert (inner_layout("NHD"), inner_layout(None), inner_layout("NDH")) == ("NHD", None, None)


def test_split_keys_and_values_are_told_from_those_in_a_block() -> None:
    for name, is_split in (("NHD", True), ("NHD_in_block", False), ("LBHNC", False)):
        assert are_split(named_layout(name).planes(SIZES, 0, MEMORY)[:2]) is is_split
