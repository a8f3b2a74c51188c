"""Keys and values in tiles (AMX): against numpy's packing, and one item at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.core.errors import UnplannableCopy, UnreadableGeometry
from kvpatch.geometry.dimension_order import DimensionOrder, KeyOrder
from kvpatch.geometry.layout_strides import BY_COLUMN, HND, DenseBlocks
from kvpatch.geometry.plane import Content, Counts, Plane, Strides, TensorFacts, Tile
from kvpatch.geometry.planes_of_tensors import read_planes
from kvpatch.geometry.segments import BlockList, pair_blocks, uncovered_tail

from .packed_tiles import by_column, by_row, packed_keys, packed_values
from .planned import plan_copy
from .reference import byte_offset, execute, token_place
from .test_direct_plan import DRAM, SOURCE, TARGET, Side, noise, zero_tail
from .test_staged_plan import chunks_of, do
from .whole_caches import as_array

pytestmark = pytest.mark.geometry

PACKED = DimensionOrder(("block", "head", "token", "packed"))
KEYS_FIRST = DimensionOrder(("kv", "block", "head", "token", "channel"))
PACKERS = {
    KeyOrder.ROW_MAJOR: (by_row, by_row),
    KeyOrder.COLUMN_MAJOR: (by_column, by_row),
    KeyOrder.TILED: (packed_keys, packed_values),
}
_BLOCKS, _HEADS = 6, 2


def rows_of(seed: int, tokens: int, channels: int = 32) -> np.ndarray:
    """[kv, block, head, token, channel] without a zero byte among them."""
    shape = 2, _BLOCKS, _HEADS, tokens, channels
    noise_bytes = noise(seed, 2 * int(np.prod(shape)))
    return np.frombuffer(noise_bytes, dtype=np.uint16).reshape(shape)


def cache_of(order: KeyOrder, rows: np.ndarray) -> bytes:
    """Packed (from 0.26): a head's keys of a block, and then its values."""
    packed = [pack(part) for pack, part in zip(PACKERS[order], rows, strict=True)]
    return np.concatenate(packed, axis=-1).tobytes()


def planes_at(order: KeyOrder, tokens: int, address: int, channels: int = 32) -> tuple[Plane, ...]:
    """Of a tensor as the backend shapes it; rows as a block's keys and then its values."""
    item = 2
    piece = tokens * channels * item
    if order is KeyOrder.ROW_MAJOR:
        strides = Strides(_HEADS * 2 * piece, 2 * piece, channels * item, item)
        counts = Counts(_BLOCKS, _HEADS, tokens, channels)
        return tuple(
            Plane("layer.0", content, address + n * piece, strides, counts, item, 0, DRAM)
            for n, content in enumerate((Content.KEY, Content.VALUE))
        )
    shape = _BLOCKS, _HEADS, tokens, 2 * channels
    strides_items = _HEADS * 2 * tokens * channels, 2 * tokens * channels, 2 * channels, 1
    size = item * int(np.prod(shape))
    facts = TensorFacts(address, shape, strides_items, item, DRAM, address, size)
    return read_planes("layer.0", facts, PACKED, order)


# --- what they are read as --------------------------------------------------------------------


@pytest.mark.parametrize("order", PACKERS)
@pytest.mark.parametrize("tokens", [32, 64, 96, 128])
@pytest.mark.parametrize("channels", [32, 64, 128])
def test_planes_show_the_rows_that_were_packed(order: KeyOrder, tokens: int, channels: int) -> None:
    rows = rows_of(1, tokens, channels)
    raw = cache_of(order, rows)
    planes = planes_at(order, tokens, SOURCE, channels)

    for plane, wanted in zip(planes, rows, strict=True):
        assert as_array(plane, raw, SOURCE).view(np.uint16)[..., 0].tobytes() == wanted.tobytes()
        for place in [
            (0, 0, 0, 0),
            (1, 1, 17, 5),
            (5, 0, tokens - 1, channels - 1),
            (2, 1, 31, 16),
        ]:
            start = plane.address - SOURCE + byte_offset(plane, *place)
            assert raw[start : start + 2] == wanted[place].tobytes()
    spans = [plane.span() for plane in planes]
    assert (min(a for a, _ in spans), max(b for _, b in spans)) == (SOURCE, SOURCE + len(raw))


@pytest.mark.parametrize("order", [KeyOrder.COLUMN_MAJOR, KeyOrder.TILED])
@pytest.mark.parametrize("tokens", [32, 64])
def test_keys_and_values_apart(order: KeyOrder, tokens: int) -> None:
    """<= 0.22 all keys come first."""
    rows = rows_of(1, tokens)
    raw = b"".join(pack(part).tobytes() for pack, part in zip(PACKERS[order], rows, strict=True))
    channels, heads = 32, _HEADS
    shape = 2, _BLOCKS, heads, tokens, channels
    strides = [int(np.prod(shape[n + 1 :])) for n in range(5)]
    facts = TensorFacts(SOURCE, shape, tuple(strides), 2, DRAM, SOURCE, len(raw))
    planes = read_planes("layer.0", facts, KEYS_FIRST, order)

    for plane, wanted in zip(planes, rows, strict=True):
        assert as_array(plane, raw, SOURCE).view(np.uint16)[..., 0].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("order", [KeyOrder.COLUMN_MAJOR, KeyOrder.TILED])
def test_a_peers_blocks_are_those_of_a_tensor(order: KeyOrder) -> None:
    """Planes of a region, by what ours are."""
    theirs = planes_at(order, 64, SOURCE)
    ours = planes_at(KeyOrder.TILED, 32, TARGET)
    stride = theirs[0].strides_bytes.block
    dense = DenseBlocks(SOURCE, stride, BY_COLUMN, _BLOCKS, _HEADS, 64, 0, DRAM, order)

    assert dense.planes(ours) == theirs


def test_rows_at_a_peer_have_no_tiles() -> None:
    ours = planes_at(KeyOrder.TILED, 32, TARGET)
    stride = planes_at(KeyOrder.ROW_MAJOR, 64, SOURCE)[0].strides_bytes.block
    dense = DenseBlocks(SOURCE, stride, HND, _BLOCKS, _HEADS, 64, 0, DRAM)

    assert all(plane.tile is None for plane in dense.planes(ours))


@pytest.mark.parametrize(
    ("tokens", "channels", "item"), [(48, 32, 2), (32, 48, 2), (32, 32, 4), (32, 32, 1)]
)
def test_what_no_kernel_tiles_is_refused(tokens: int, channels: int, item: int) -> None:
    shape = _BLOCKS, _HEADS, tokens, 2 * channels
    strides = _HEADS * 2 * tokens * channels, 2 * tokens * channels, 2 * channels, 1
    facts = TensorFacts(SOURCE, shape, strides, item, DRAM, SOURCE, item * int(np.prod(shape)))
    with pytest.raises(UnreadableGeometry, match="expected tiles of items of 2 bytes"):
        read_planes("layer.0", facts, PACKED, KeyOrder.TILED)


def test_a_part_of_a_tile_is_refused() -> None:
    counts, strides = Counts(1, 1, 6, 4), Strides(96, 96, 32, 2)
    with pytest.raises(UnreadableGeometry, match="whole number of tiles"):
        Plane("l", Content.KEY, 0, strides, counts, 2, 0, DRAM, tile=Tile(4, 8, 4, 2))


# --- copies between them ----------------------------------------------------------------------


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, ...]:
    """Two caches of one request, one of them tiled at least."""
    first = draw(st.integers(0, 70))
    end = draw(st.integers(first, 150))
    sides = []
    orders = draw(
        st.sampled_from([(a, b) for a in KeyOrder for b in KeyOrder if KeyOrder.TILED in (a, b)])
    )
    for order in orders:
        tokens = draw(st.sampled_from([32, 64, 96, 128]))
        if order is not KeyOrder.TILED:
            tokens = draw(st.sampled_from([16, 24, 32, 40, 64, 100]))
        start = draw(st.sampled_from([0, first // tokens * tokens]))
        used = -(-(end - start) // tokens)
        if used > _BLOCKS:
            start, used = first // tokens * tokens, -(-(end - first // tokens * tokens) // tokens)
        ids = draw(st.permutations(range(_BLOCKS)))
        sides.append((order, tokens, BlockList(np.array(ids[:used]), tokens, start)))
        if used > _BLOCKS:
            end = min(end, start + _BLOCKS * tokens)
    return (*sides, first, end)


def _places(blocks: BlockList, tokens: range) -> list[tuple[Any, ...]]:
    """Where these tokens lie in rows of all blocks."""
    places = (token_place(blocks, token) for token in tokens)
    return [(slice(None), block, slice(None), offset) for block, offset in places]


@given(pairs())
@settings(max_examples=100, deadline=None)
def test_every_token_in_its_place(drawn: Any) -> None:
    """Between tiles, rows and columns: the request's tokens, zeros behind them, nothing else."""
    (p_order, p_tokens, remote), (d_order, d_tokens, local), first, end = drawn
    end = min(end, remote.end_token, local.end_token)
    if first >= end:
        return
    theirs, ours = rows_of(1, p_tokens), rows_of(2, d_tokens)
    expected, tokens = ours.copy(), range(first, end)
    for there, here in zip(_places(remote, tokens), _places(local, tokens), strict=True):
        expected[here] = theirs[there]
    for here in _places(local, range(end, local.end_token)):
        expected[here] = 0
    source, before = cache_of(p_order, theirs), cache_of(d_order, ours)
    p = Side(planes_at(p_order, p_tokens, SOURCE), remote, len(source))
    d = Side(planes_at(d_order, d_tokens, TARGET), local, len(before))
    segments, tail = pair_blocks(remote, local, first, end), uncovered_tail(local, end)
    for way in ("direct", "numpy", "torch"):
        found = bytearray(before)
        if way == "direct":
            execute(plan_copy(segments, p.planes, d.planes), source, SOURCE, found, TARGET)
        else:
            do(chunks_of(p, d, segments), source, found, way)
        zero_tail(d, tail, found)

        assert bytes(found) == cache_of(d_order, expected), way


@pytest.mark.parametrize("taken_for", [KeyOrder.COLUMN_MAJOR, KeyOrder.ROW_MAJOR])
def test_tiles_that_are_taken_for_something_else_are_noticed(taken_for: KeyOrder) -> None:
    """What the tests above compare by is no comparison of nothing."""
    theirs = rows_of(1, 64)
    remote, local = BlockList(np.arange(2), 64), BlockList(np.arange(4), 32)
    source, found = cache_of(KeyOrder.TILED, theirs), bytearray(cache_of(KeyOrder.TILED, theirs))
    plan = plan_copy(
        pair_blocks(remote, local, 0, 128),
        planes_at(taken_for, 64, SOURCE),
        planes_at(KeyOrder.TILED, 32, TARGET),
    )
    found = bytearray(_BLOCKS * _HEADS * 2 * 32 * 32 * 2)
    execute(plan, source, SOURCE, found, TARGET)
    shown = [
        as_array(plane, bytes(found), TARGET).view(np.uint16)[..., 0]
        for plane in planes_at(KeyOrder.TILED, 32, TARGET)
    ]

    assert (shown[0][0] != theirs[0, 0, :, :32]).any()


def test_tiles_of_two_sizes_are_refused() -> None:
    counts = Counts(1, 1, 8, 4)
    planes = [
        Plane("l", Content.KEY, 0, Strides(64, 64, size * 8, 4), counts, 2, 0, DRAM,
              tile=Tile(size, 8, 2, 2))
        for size in (4, 8)
    ]  # fmt: skip
    segments = pair_blocks(BlockList(np.arange(1), 8), BlockList(np.arange(1), 8), 0, 8)
    with pytest.raises(UnplannableCopy, match="tiles of one size"):
        plan_copy(segments, planes[:1], planes[1:])
