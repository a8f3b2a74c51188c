"""Digests of caches: one request, one digest, however it lies; and what each fault does to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.checks import cache_digests, digest_pieces
from kvpatch.checks.cache_digests import TableTokens, memories_of, sums_of
from kvpatch.checks.digest_pieces import device_sums, host_sums
from kvpatch.checks.digests import Digests, Weights, compare, ranges_of
from kvpatch.core.errors import DigestsRefused
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides
from kvpatch.geometry.segments import BlockList
from kvpatch.transfer.one_memory import Bytes
from tests.geometry.slow_digests import as_numbers, cell, digests_of, of_all_ranks, proves
from tests.geometry.whole_caches import LAYOUTS, CacheSizes, named_layout

from .digest_world import SEED, Engine, Rank, Request, as_whole, digested, request_of
from .operations import Operations


def expected_of(request: Request, ranges: tuple[tuple[int, int], ...]) -> Digests:
    """The slow way, of all heads."""
    weights = Weights(SEED)
    cells = {
        (f"layer.{layer}", content): {
            head: [
                cell([row.tobytes() for row in rows[start:end]], start, weights)
                for start, end in ranges
            ]
            for head, rows in enumerate(request[layer, number])
        }
        for layer in range(request.shape[0])
        for number, content in enumerate((Content.KEY, Content.VALUE))
    }
    return digests_of(cells, ranges, SEED)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Request, list[Rank], int]:
    """A request, an engine of some ranks, and a length of ranges."""
    heads = draw(st.integers(1, 4))
    request = request_of(
        layers=draw(st.integers(1, 3)),
        heads=heads,
        tokens=draw(st.integers(1, 40)),
        channels=draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16])),
        item_bytes=draw(st.sampled_from([1, 2, 4, 8])),
    )
    layout = draw(st.sampled_from(sorted(set(LAYOUTS) - {"kvcached_split_half"})))
    block_tokens = draw(st.sampled_from([1, 3, 4, 16, 64]))
    borders = sorted({0, heads, *draw(st.lists(st.integers(0, heads), max_size=3))})
    ranks = [
        Rank(layout, block_tokens, range(start, end), seed=start)
        for start, end in zip(borders, borders[1:], strict=False)
    ]
    return request, ranks, draw(st.sampled_from([1, 5, 16, 100]))


@settings(max_examples=150)
@given(worlds())
def test_all_layouts_blocks_and_ranks_come_to_the_same_sums(world):
    request, ranks, range_tokens = world
    found = of_all_ranks([Engine(request, rank).digests(range_tokens) for rank in ranks])

    expected = expected_of(request, ranges_of(0, request.shape[3], range_tokens))

    assert found.ranges == expected.ranges
    assert as_numbers(found) == as_numbers(expected)
    assert proves(expected, found)


@pytest.mark.parametrize("slice_bytes", [1, 700, 5_000])
def test_a_cache_that_is_read_in_slices_has_the_same_sums(monkeypatch, slice_bytes):
    """Slices of planes and of blocks, and on the host slices of these."""
    request = request_of()
    whole = Engine(request, Rank()).digests(24)
    monkeypatch.setattr(cache_digests, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(digest_pieces, "_HOST_SLICE_BYTES", slice_bytes // 3)

    assert as_numbers(Engine(request, Rank()).digests(24)) == as_numbers(whole)


def assert_device_sums(memory: torch.Tensor, planes: Sequence[Plane], blocks: BlockList) -> None:
    """A device's sums of all the planes' blocks are those of the host."""
    memories = memories_of(dict.fromkeys((plane.layer for plane in planes), memory))
    counts = planes[0].counts
    for alike in TableTokens({}, memories, tuple(planes), blocks, 0, blocks.end_token).alike():
        numbers = alike.numbers(blocks.block_ids)
        view = alike.view(int(numbers.max()) + 1)
        weights = Weights(SEED).words(-(-counts.channels * planes[0].item_bytes // 4))
        told = torch.from_numpy(numbers), torch.from_numpy(weights.view(np.int64))

        on_device = device_sums(view, *told, counts.block_tokens)

        assert torch.equal(on_device, host_sums(view, numbers, weights, counts.block_tokens))


@pytest.mark.parametrize("layout", ["HND", "NHD", "CPU_packed"])
@pytest.mark.parametrize(("channels", "item_bytes"), [(8, 2), (3, 1), (3, 2), (5, 4)])
def test_a_device_sums_as_the_host_does(layout: str, channels: int, item_bytes: int) -> None:
    request = request_of(channels=channels, item_bytes=item_bytes)
    engine = Engine(request, Rank(layout))
    assert_device_sums(engine.memory, engine.planes, engine.blocks)


@given(st.integers(0, 60), st.integers(1, 10), st.sampled_from([1, 7, 16, 32]))
def test_parts_of_a_request_have_the_sums_that_the_whole_has(first, length, block_tokens):
    """Behind a prefix hit, in other blocks: positions are the request's."""
    request = request_of(layers=1, heads=1)
    whole = Engine(request, Rank(heads=range(1))).digests(10)
    rank = Rank("NHD", block_tokens, range(1), first_token=first, seed=5)
    part = Engine(request, rank).digests(10, first, min(70, first + length))

    found = compare(whole, part)

    assert not found.wrong
    full = [extent for extent in part.ranges if extent in whole.ranges]
    assert found.checked == 2 * len(full)
    assert (not found.unchecked) == (len(full) == len(part.ranges))


@given(st.integers(1, 69))
def test_blocks_that_are_wholes_count_once_wherever_ranges_meet(border: int) -> None:
    engine = Engine(request_of(layers=1), Rank())
    parts = [
        engine.digests(1000, first, end, change=as_whole)
        for first, end in ((0, border), (border, 70))
    ]
    whole = engine.digests(1000, change=as_whole)

    for head, (expected,) in as_numbers(whole).items():
        total = sum(as_numbers(part)[head][0] for part in parts if part.ranges)
        assert total % 2**64 == expected


def test_all_of_a_whole_block_counts() -> None:
    """Bytes behind the last token too: scales may lie there."""
    engine = Engine(request_of(), Rank())
    rows, whole = engine.digests(), engine.digests(change=as_whole)
    last = int(engine.blocks.block_ids[-1])
    engine.view(engine.planes[0])[last, 2, -1, 0, 0] ^= 1

    assert proves(rows, engine.digests())
    found = compare(whole, engine.digests(change=as_whole))
    assert [str(place) for place in found.wrong] == [
        "layer 'layer.0', key of heads 2, tokens 64 to 69"
    ]


def test_a_recurrent_state_of_many_words() -> None:
    """A block of one token, longer than a row of words may be, of two ranks."""
    elements, blocks = 5001, 4
    states = np.random.default_rng(1).integers(0, 256, (2, blocks, elements * 2), dtype=np.uint8)
    parts = []
    for rank, of_rank in enumerate(states):
        memory = torch.from_numpy(of_rank.copy())
        plane = Plane(
            "mamba",
            Content.STATE,
            memory.data_ptr(),
            Strides(elements * 2, elements * 2, elements * 2, 2),
            Counts(blocks, 1, 1, elements),
            2,
            rank,
            Memory("DRAM"),
        )
        memories, blocks_of = memories_of({"mamba": memory}), BlockList(np.array([2]), 1)
        parts.append(digested(memories, [plane], blocks_of, 1, (0, 1)))

    found = of_all_ranks(parts)

    expected = [cell([states[rank, 2].tobytes()], 0, Weights(SEED)) for rank in range(2)]
    heads = as_numbers(found)
    assert [heads["mamba", Content.STATE, rank] for rank in range(2)] == [[e] for e in expected]


def test_layers_of_unlike_geometry_are_in_one_digest() -> None:
    """Layers in memory of their own, of other widths and item sizes."""
    parts = [Engine(request_of(layers=1, channels=width), Rank()) for width in (8, 3)]
    planes = [
        replace(plane, layer=f"{plane.layer}.{number}")
        for number, part in enumerate(parts)
        for plane in part.planes
    ]
    tensors = {f"layer.0.{number}": part.memory for number, part in enumerate(parts)}
    parts[1].blocks = parts[0].blocks
    found = digested(memories_of(tensors), planes, parts[0].blocks, 16, (0, 70))

    first = parts[0].digests()

    assert {layer for layer, *_ in found.heads} == {"layer.0.0", "layer.0.1"}
    numbers = as_numbers(found)
    assert as_numbers(first)["layer.0", Content.KEY, 2] == numbers["layer.0.0", Content.KEY, 2]


def test_blocks_of_others_are_refused() -> None:
    engine = Engine(request_of(), Rank())
    memories = memories_of(dict.fromkeys((p.layer for p in engine.planes), engine.memory))

    for blocks in (BlockList(np.array([0, 1]), 8), BlockList(np.array([99, 7]), 16)):
        with pytest.raises(DigestsRefused, match="expected blocks of 16 tokens below 8"):
            digested(memories, engine.planes, blocks, 16, (0, 16))
    for first, end in ((0, 81), (5, 5), (9, 3)):
        with pytest.raises(DigestsRefused, match="expected some tokens"):
            digested(memories, engine.planes, engine.blocks, 16, (first, end))


def test_layers_in_memory_of_their_own_have_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose allocations torch does not take as one range."""
    engine = Engine(request_of(), Rank("NHD"))
    together = engine.digests()
    monkeypatch.setattr(cache_digests, "one_memory", lambda tensors: None)

    assert as_numbers(engine.digests()) == as_numbers(together)


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_layers_are_summed_together(layout: str) -> None:
    """80 layers, 1,000 tokens: operations by the bytes, not by the layers."""
    blocks = 63
    sizes = CacheSizes(80, blocks, 8, 16, 128, 2)
    memory = Bytes(1 << 32, torch.empty(sizes.total_bytes(), dtype=torch.uint8, device="meta"))
    planes = named_layout(layout).planes(sizes, memory.address, Memory("VRAM"))
    memories = dict.fromkeys((p.layer for p in planes), memory)
    order = BlockList(np.random.default_rng(0).permutation(blocks), 16)
    table = TableTokens({}, memories, tuple(planes), order, 0, 1000)

    with Operations() as counted:
        for alike in table.alike():
            for piece in table.pieces(alike, [(0, 1000)], 256, Weights(SEED)):
                sums_of(piece)

    assert counted.count <= 20 * -(-sizes.total_bytes() // cache_digests.SLICE_BYTES)
