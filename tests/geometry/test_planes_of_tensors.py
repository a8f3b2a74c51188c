"""Tensors to planes: literal cases, a property, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.dimension_order import DimensionOrder, KeyOrder
from kvpatch.geometry.plane import Content, Counts, Memory, TensorFacts
from kvpatch.geometry.planes_of_tensors import read_planes

from .reference import positions
from .whole_caches import as_array

pytestmark = pytest.mark.geometry

BASE = 0x10000
LAYER = "model.layers.7.self_attn.attn"


def facts(
    shape: Sequence[int],
    memory_order: Sequence[int] | None = None,
    item_bytes: int = 2,
    **changes: Any,
) -> TensorFacts:
    """A dense tensor whose dimensions lie in ``memory_order``, outermost first."""
    strides = [0] * len(shape)
    step = 1
    for dimension in reversed(memory_order or range(len(shape))):
        strides[dimension] = step
        step *= shape[dimension]
    arguments: dict[str, Any] = {
        "address": BASE,
        "shape": tuple(shape),
        "strides": tuple(strides),
        "item_bytes": item_bytes,
        "memory": Memory("DRAM"),
        "storage_address": BASE,
        "storage_bytes": step * item_bytes,
    }
    return TensorFacts(**{**arguments, **changes})


REGIONS = DimensionOrder(("kv", "block", "token", "head", "channel"))
PACKED = DimensionOrder(("block", "head", "token", "packed"))
MLA = DimensionOrder(("block", "token", "channel"))
TPU = DimensionOrder(("block", "token", "packed_head", "channel"))
CPU = DimensionOrder(("kv", "block", "head", "token", "channel"))
ROW, COLUMN = KeyOrder.ROW_MAJOR, KeyOrder.COLUMN_MAJOR


def test_state_of_a_block() -> None:
    order = DimensionOrder(("block", "state", "state"))
    tensor = facts((5, 3, 8), strides=(40, 8, 1), storage_bytes=5 * 80)
    (state,) = read_planes("mamba", tensor, order)
    assert (state.content, state.counts) == (Content.STATE, Counts(5, 1, 1, 24))
    assert (state.strides_bytes.block, state.strides_bytes.channel) == (80, 2)
    with pytest.raises(UnreadableGeometry, match=r"mamba.*gaps"):
        read_planes("mamba", facts((5, 3, 8), strides=(40, 9, 1), storage_bytes=400), order)


@st.composite
def tensors(
    draw: st.DrawFn,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], DimensionOrder, int, tuple[int, ...]]:
    """A tensor in any memory order with padding, and the storage that it lies in."""
    sizes = {
        "block": draw(st.integers(1, 4)),
        "token": draw(st.integers(1, 4)),
        "head": draw(st.integers(1, 3)),
        "channel": draw(st.integers(1, 4)),
        "kv": 2,
    }
    key_channels = draw(st.integers(1, 4))
    sizes["packed"] = key_channels + sizes["channel"]
    sizes["packed_head"] = 2 * sizes["head"]
    names = draw(
        st.sampled_from(
            [
                ("kv", "block", "token", "head", "channel"),
                ("block", "token", "head", "packed"),
                ("block", "token", "packed_head", "channel"),
                ("block", "token", "channel"),
                ("block", "token", "head", "channel"),
            ]
        ).flatmap(st.permutations)
    )
    dimensions = tuple(names)
    shape = tuple(sizes[name] for name in dimensions)
    strides = [0] * len(shape)
    step = 1
    for dimension in draw(st.permutations(range(len(shape)))):
        strides[dimension] = step
        step = step * shape[dimension] + draw(st.sampled_from([0, 0, 1, 3]))
    offset = draw(st.integers(0, 5))
    item_bytes = draw(st.sampled_from([1, 2, 4]))
    used = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    dtype = np.dtype(f"u{item_bytes}")
    storage = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, np.iinfo(dtype).max, offset + used + 2, dtype=dtype
    )
    tensor = np.lib.stride_tricks.as_strided(
        storage[offset:], shape, tuple(stride * item_bytes for stride in strides)
    )
    known = {"key_channels": key_channels, "value_channels": sizes["channel"]}
    if "packed" in dimensions:  # one of the two widths is enough
        for name in draw(st.sampled_from([(), ("key_channels",), ("value_channels",)])):
            del known[name]
    widths = known if "packed" in dimensions else {}
    return tensor, storage, DimensionOrder(dimensions, **widths), key_channels, tuple(strides)


@given(tensors())
@settings(max_examples=150, deadline=None)
def test_reading_gives_the_logical_content(drawn: Any) -> None:
    """Each plane's bytes, one at a time, are those that indexing the tensor by name gives."""
    tensor, storage, order, key_channels, strides = drawn
    offset = tensor.__array_interface__["data"][0] - storage.__array_interface__["data"][0]
    described = TensorFacts(
        BASE + offset, tensor.shape, strides, tensor.itemsize, Memory("DRAM"), BASE, storage.nbytes
    )
    raw = storage.tobytes()
    planes = read_planes(LAYER, described, order, first_head=3)
    for plane in planes:
        names = set(order.dimensions)
        assert (plane.content is Content.LATENT) == (not names & {"kv", "packed", "packed_head"})
        assert plane.first_head == (3 if names & {"head", "packed_head"} else 0)
        value = int(plane.content is Content.VALUE)
        view = as_array(plane, raw, BASE)
        assert view.shape == (*plane.counts, plane.item_bytes)
        for (block, head, token, channel), address in positions(plane):
            index = {
                "block": block,
                "head": head,
                "token": token,
                "channel": channel,
                "kv": value,
                "packed": channel + value * key_channels,
                "packed_head": 2 * head + value,
            }
            expected = tensor[tuple(index[name] for name in order.dimensions)].tobytes()
            assert raw[address - BASE : address - BASE + plane.item_bytes] == expected
            assert view[block, head, token, channel].tobytes() == expected
    assert sum(prod(plane.counts) for plane in planes) == tensor.size


REFUSED: dict[str, tuple[TensorFacts, DimensionOrder, KeyOrder, str]] = {
    "no blocks": (facts((2, 0, 4, 3, 8), strides=(1, 96, 24, 8, 1)), REGIONS, ROW, "0 blocks"),
    "no channels": (facts((5, 4, 0), strides=(1, 1, 1)), MLA, ROW, "0 channels"),
    "overlap of blocks": (
        facts((2, 5, 4, 3, 8), strides=(480, 95, 24, 8, 1)), REGIONS, ROW, "overlapping strides",
    ),
    "overlap of keys and values": (
        facts((2, 5, 4, 3, 8), strides=(96, 96, 24, 8, 1)), REGIONS, ROW, "overlapping strides",
    ),
    "expanded dimension": (
        facts((2, 5, 4, 3, 8), strides=(480, 96, 24, 0, 1)), REGIONS, ROW, "overlapping strides",
    ),
    "negative stride": (
        facts((2, 5, 4, 3, 8), strides=(480, -96, 24, 8, 1)), REGIONS, ROW, "-96",
    ),
    "behind its storage": (
        facts((2, 5, 4, 3, 8), storage_bytes=1919), REGIONS, ROW, "inside its storage",
    ),
    "before its storage": (
        facts((2, 5, 4, 3, 8), storage_address=BASE + 2), REGIONS, ROW, "inside its storage",
    ),
    "too few dimensions": (facts((5, 4, 8)), REGIONS, ROW, "5 dimensions"),
    "shape and strides differ": (facts((5, 4, 8), strides=(32, 8)), MLA, ROW, "2 strides"),
    "kv is not two": (facts((3, 5, 4, 3, 8)), REGIONS, ROW, "a kv dimension of 2"),
    "blocks taken for kv": (facts((5, 2, 4, 3, 8)), REGIONS, ROW, "a kv dimension of 2"),
    "odd packed": (facts((5, 3, 4, 15)), PACKED, ROW, "found 15"),
    "keys wider than the row": (
        facts((5, 3, 4, 16)),
        DimensionOrder(("block", "head", "token", "packed"), key_channels=16), ROW, "found 16",
    ),
    "widths that do not add up": (
        facts((5, 3, 4, 16)),
        DimensionOrder(("block", "head", "token", "packed"), 8, 7), ROW, "found 16",
    ),
    "odd heads": (facts((5, 4, 5, 8)), TPU, ROW, "5 heads"),
    "no item size": (facts((5, 4, 8), item_bytes=0), MLA, ROW, "1 byte or more"),
    "column-major NHD": (facts((2, 5, 4, 3, 8)), REGIONS, COLUMN, "one piece"),
    "column-major MLA": (facts((5, 4, 8)), MLA, COLUMN, "head dimension"),
    "column-major padded rows": (
        facts((5, 3, 4, 16), strides=(204, 68, 17, 1), storage_bytes=5000), PACKED, COLUMN,
        "one piece",
    ),
    "column-major unlike widths": (
        facts((5, 3, 4, 16)),
        DimensionOrder(("block", "head", "token", "packed"), 6), COLUMN, "as wide as values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_tensors_are_refused_with_layer_shape_and_strides(name: str) -> None:
    tensor, order, key_order, found = REFUSED[name]
    with pytest.raises(UnreadableGeometry) as refused:
        read_planes(LAYER, tensor, order, key_order)
    message = str(refused.value)
    for part in (found, LAYER, str(tensor.shape), str(tensor.strides), str(order.dimensions)):
        assert part in message
