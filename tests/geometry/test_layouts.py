"""Named layouts: their strides, written out, and the tensors that they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpatch.geometry import (
    LAYOUTS,
    CacheSizes,
    Content,
    DimensionOrder,
    KeyOrder,
    Memory,
    Strides,
    TensorFacts,
    UnreadableGeometry,
    dense_plane,
    host_mirror,
    named_layout,
    read_planes,
)

from .reference import positions

pytestmark = pytest.mark.geometry

MEMORY = Memory("VRAM", 1)
# 2 layers, 5 blocks, 3 heads, 4 tokens, 8 channels of 2 bytes.
SIZES = CacheSizes(2, 5, 3, 4, 8, 2)

# name: strides of values, then bytes from keys to values and from layer to layer
STRIDES = {
    "NHD": (Strides(192, 16, 48, 2), 960, 1920),
    "HND": (Strides(192, 64, 16, 2), 960, 1920),
    "NHD_in_block": (Strides(384, 16, 48, 2), 192, 1920),
    "HND_in_block": (Strides(384, 64, 16, 2), 192, 1920),
    "LBHNC": (Strides(384, 128, 32, 2), 16, 1920),
    "LBNHC": (Strides(384, 32, 96, 2), 16, 1920),
    "LHBNC": (Strides(128, 640, 32, 2), 16, 1920),
    "BLHNC": (Strides(768, 128, 32, 2), 16, 384),
    "BLNHC": (Strides(768, 32, 96, 2), 16, 384),
    "BHLNC": (Strides(768, 256, 32, 2), 16, 128),
    "kvcached_split_half": (Strides(192, 16, 48, 2), 960, 1920),
    "kvcached_contiguous": (Strides(768, 16, 48, 2), 192, 384),
    "CPU_split": (Strides(192, 64, 16, 2), 960, 1920),
    "CPU_packed": (Strides(384, 128, 16, 2), 64, 1920),
    "TPU": (Strides(384, 32, 96, 2), 16, 1920),
}


def test_every_layout_is_in_the_table() -> None:
    assert set(STRIDES) == set(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides(name: str) -> None:
    value_strides, apart, layer = STRIDES[name]
    planes = named_layout(name).planes(SIZES, 4096, MEMORY, first_head=6)
    assert [(plane.layer, plane.content) for plane in planes] == [
        ("layer.0", Content.KEY),
        ("layer.0", Content.VALUE),
        ("layer.1", Content.KEY),
        ("layer.1", Content.VALUE),
    ]
    key_strides = value_strides
    if LAYOUTS[name].key_order is KeyOrder.COLUMN_MAJOR:
        key_strides = value_strides._replace(token=2, channel=8)
    assert [plane.strides_bytes for plane in planes] == [key_strides, value_strides] * 2
    assert [plane.address - 4096 for plane in planes] == [0, apart, layer, layer + apart]
    assert {(plane.memory, plane.first_head) for plane in planes} == {(MEMORY, 6)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_belongs_to_one_item(name: str) -> None:
    planes = named_layout(name).planes(SIZES, 0, MEMORY)
    places = sorted(address for plane in planes for _, address in positions(plane))
    assert places == list(range(0, SIZES.total_bytes(), 2))


TENSORS = {
    "NHD": (("kv", "block", "token", "head", "channel"), (2, 5, 4, 3, 8), (480, 96, 24, 8, 1)),
    "HND": (("kv", "block", "token", "head", "channel"), (2, 5, 4, 3, 8), (480, 96, 8, 32, 1)),
    "NHD_in_block": (
        ("block", "kv", "token", "head", "channel"),
        (5, 2, 4, 3, 8),
        (192, 96, 24, 8, 1),
    ),
    "LBHNC": (("block", "head", "token", "packed"), (5, 3, 4, 16), (192, 64, 16, 1)),
    "LBNHC": (("block", "head", "token", "packed"), (5, 3, 4, 16), (192, 16, 48, 1)),
    "CPU_split": (
        ("kv", "block", "head", "token", "channel"), (2, 5, 3, 4, 8), (480, 96, 32, 8, 1),
    ),
    "CPU_packed": (("block", "head", "token", "packed"), (5, 3, 4, 16), (192, 64, 16, 1)),
    "TPU": (("block", "token", "packed_head", "channel"), (5, 4, 6, 8), (192, 48, 8, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_a_registered_tensor_reads_as_its_layout(name: str) -> None:
    dimensions, shape, strides = TENSORS[name]
    layout = named_layout(name)
    facts = TensorFacts(4096, shape, strides, 2, MEMORY, 4096, 1920)
    read = read_planes("layer.0", facts, DimensionOrder(dimensions), layout.key_order)
    assert read == layout.planes(replace(SIZES, layers=1), 4096, MEMORY)


def test_one_content() -> None:
    sizes = replace(SIZES, heads=1, contents=(Content.LATENT,))
    planes = named_layout("LBNHC").planes(sizes, 0, MEMORY, layers=("a", "b"))
    assert [(plane.layer, plane.content, plane.address) for plane in planes] == [
        ("a", Content.LATENT, 0),
        ("b", Content.LATENT, 320),
    ]
    assert planes[0].strides_bytes._replace(head=0) == Strides(64, 0, 16, 2)


def test_values_of_another_width_fit_only_packed_layouts() -> None:
    sizes = replace(SIZES, value_channels=6)
    keys, values, *_ = named_layout("LBHNC").planes(sizes, 0, MEMORY)
    assert keys.strides_bytes == values.strides_bytes == Strides(336, 112, 28, 2)
    assert (values.address, keys.counts.channels, values.counts.channels) == (16, 8, 6)
    with pytest.raises(UnreadableGeometry, match=r"NHD.*\(8, 6\)"):
        named_layout("NHD").planes(sizes, 0, MEMORY)


def test_halves_that_are_far_apart() -> None:
    layout = named_layout("kvcached_split_half")
    planes = layout.planes(SIZES, 0, MEMORY, value_offset_bytes=1 << 30)
    assert [plane.address for plane in planes] == [0, 1 << 30, 2 << 30, 3 << 30]
    assert planes[0].strides_bytes.block == 192


@pytest.mark.parametrize(("name", "offset"), [("NHD", 959), ("LBHNC", 4096)])
def test_an_offset_that_does_not_fit_is_refused(name: str, offset: int) -> None:
    with pytest.raises(UnreadableGeometry, match=f"{name}.*{offset}"):
        named_layout(name).planes(SIZES, 0, MEMORY, value_offset_bytes=offset)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnreadableGeometry, match=r"'NDH'.*LBHNC"):
        named_layout("NDH")
    with pytest.raises(UnreadableGeometry, match="2 layer names, found 1"):
        named_layout("NHD").planes(SIZES, 0, MEMORY, layers=("a",))


def test_a_host_mirror_keeps_every_distance() -> None:
    planes = named_layout("BLHNC").planes(SIZES, 1 << 40, MEMORY)
    mirror = host_mirror(planes, 4096)
    assert [ours.address - 4096 for ours in mirror] == [
        theirs.address - (1 << 40) for theirs in planes
    ]
    assert {plane.memory for plane in mirror} == {Memory("DRAM")}
    assert [plane.strides_bytes for plane in mirror] == [plane.strides_bytes for plane in planes]
    assert host_mirror((), 0) == ()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dense_plane_has_no_gaps_and_keeps_the_order_in_a_block(name: str) -> None:
    for plane in named_layout(name).planes(SIZES, 0, MEMORY):
        dense = dense_plane(plane, 512)
        assert dense.span() == (512, 512 + 5 * 192)
        assert dense.strides_bytes.block == 192
        assert sorted(address for _, address in positions(dense)) == list(range(512, 1472, 2))
        inner = [
            [place for (block, *_), place in positions(one) if block == 0] for one in (plane, dense)
        ]
        ranks = [sorted(range(96), key=places.__getitem__) for places in inner]
        assert ranks[0] == ranks[1]
