"""What a peer may state at the handshake, and what is refused of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.geometry import KeyOrder, Memory, cross, plan_runs
from kvpatch.vllm.caches import read_layers
from kvpatch.vllm.groups import Group
from kvpatch.vllm.likeness import alike_block_bytes, is_alike, refuse_smaller_blocks
from kvpatch.vllm.orders import Order
from kvpatch.vllm.peers import OurSide, heads_of, peer_regions
from kvpatch.vllm.registration import PACKED, REGISTRATIONS
from kvpatch.vllm.shares import ReadRefused, shares_of
from kvpatch.vllm.wire import PeerRefused, as_alike, read_statement

pytestmark = pytest.mark.patching

HEADS, CHANNELS, ITEM = 4, 8, 4
TOKEN = HEADS * 2 * CHANNELS * ITEM


def ours_of(block_tokens=16, blocks=10, layout="LBHNC", tp_size=1):
    heads = HEADS // tp_size
    tensors = {n: torch.zeros(blocks, heads, block_tokens, 2 * CHANNELS) for n in "ab"}
    registration = replace(
        REGISTRATIONS["g0100"], orders=lambda worker, layer: (PACKED,), layers=lambda worker: 2
    )
    layers = read_layers(registration, None, tensors)
    return tensors, OurSide(
        layers=layers,
        addresses=tuple(t.data_ptr() for t in tensors.values()),
        block_bytes=(block_tokens * TOKEN // tp_size,) * 2,
        block_tokens=block_tokens,
        kernel_blocks_per_block=1,
        layout=layout,
        inner_layout="HND",
        total_heads=HEADS,
        tp_rank=0,
        tp_size=tp_size,
        memory=Memory("DRAM"),
        backend="FLASH_ATTN",
        key_order=KeyOrder.ROW_MAJOR,
    )


def _metadata(block_tokens=64, blocks=6, **changes):
    length = block_tokens * TOKEN
    stated = {
        "engine_id": "p",
        "agent_metadata": b"",
        "kv_caches_base_addr": [1 << 20, 1 << 30],
        "device_id": 0,
        "num_blocks": blocks,
        "block_lens": [length, length],
        "block_strides": [length, length],
        "kv_cache_layout": "LBHNC",
        "block_size": block_tokens,
        "attn_backend_name": "FLASH_ATTN",
        "physical_blocks_per_logical_kv_block": 1,
    }
    return SimpleNamespace(**{**stated, **changes})


def _statement(**changes):
    return read_statement(_metadata(**changes), 0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"num_blocks": 1 << 80},
        {"num_blocks": None},
        {"num_blocks": True},
        {"num_blocks": "6"},
        {"block_size": 0},
        {"block_size": 2.5},
        {"block_lens": []},
        {"block_lens": [4096]},
        {"block_lens": None},
        {"block_lens": [-8, 8]},
        {"block_strides": [1, 1]},
        {"block_strides": "abc"},
        {"kv_caches_base_addr": []},
        {"kv_caches_base_addr": [-1, 5]},
        {"device_id": -1},
        {"physical_blocks_per_logical_kv_block": 0},
        {"region_num_blocks": [0, 3]},
    ],
)
def test_a_statement_of_no_meaning_is_refused(changes):
    with pytest.raises(PeerRefused, match="handshake has"):
        _statement(**changes)


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-(1 << 66), 1 << 66), max_size=4),
)


@given(st.sampled_from(sorted(vars(_metadata()))), _JUNK)
def test_a_mutated_statement_is_refused_or_stays_within_what_it_states(name, value):
    _, ours = ours_of()
    try:
        peer = read_statement(_metadata(**{name: value}), 0, 1)
        if is_alike(ours, peer):
            return
        planes = [plane for region in peer_regions(ours, peer) for plane in region]
    except PeerRefused:
        return
    for plane in planes:
        start, end = plane.span()
        region = max(a for a in peer.addresses if a <= start)
        stride = peer.stride_bytes[peer.addresses.index(region)]
        assert end <= region + peer.blocks * stride


def test_a_refusal_has_both_geometries_and_what_helps():
    _, ours = ours_of()
    with pytest.raises(PeerRefused) as refused:
        peer_regions(ours, _statement(block_lens=[4096, 4096], block_strides=[4096, 4096]))

    message = str(refused.value)
    assert "blocks of 64 tokens" in message and "blocks of 16 tokens" in message
    assert "4096" in message and "--kv-cache-dtype" in message


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC", "XYZ"])
def test_a_layout_whose_blocks_are_not_in_one_piece_is_refused(layout):
    _, ours = ours_of()
    with pytest.raises(PeerRefused, match=f"layout {layout}"):
        peer_regions(ours, _statement(kv_cache_layout=layout))


def test_another_backend_is_refused_where_the_geometry_differs():
    _, ours = ours_of()
    with pytest.raises(PeerRefused, match="VLLM_ATTENTION_BACKEND"):
        is_alike(ours, _statement(attn_backend_name="FLASHINFER"))


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"block_tokens": 16}, True),
        ({"block_tokens": 64}, False),
        ({"block_tokens": 16, "kv_cache_layout": "LBNHC"}, False),
    ],
)
def test_like_peers_are_told_from_unlike_ones(changes, alike):
    _, ours = ours_of()
    assert is_alike(ours, _statement(**changes)) is alike


def test_the_peer_like_us_lies_within_what_the_peer_registered():
    _, ours = ours_of(block_tokens=48)
    peer = _statement(block_tokens=64, blocks=7)
    alike = as_alike(_metadata(blocks=7), peer, 48, 1, "LBHNC", alike_block_bytes(ours, peer))

    assert alike.block_size == 48
    assert alike.num_blocks * alike.block_lens[0] <= 7 * peer.block_bytes[0]
    assert (alike.num_blocks + 1) * alike.block_lens[0] > 7 * peer.block_bytes[0]


def test_a_peer_smaller_than_a_block_of_ours_is_refused():
    _, ours = ours_of(block_tokens=128)
    peer = _statement(block_tokens=16, blocks=3)
    with pytest.raises(PeerRefused, match="more KV cache"):
        as_alike(_metadata(), peer, 128, 1, "LBHNC", alike_block_bytes(ours, peer))


@pytest.mark.parametrize(
    ("rank", "size", "expected"), [(0, 1, (0, 4)), (1, 2, (2, 2)), (5, 8, (2, 1))]
)
def test_heads_of_a_rank(rank, size, expected):
    assert heads_of(4, rank, size) == expected


def test_an_unstated_block_size_must_come_to_the_same_bytes():
    _, ours = ours_of(block_tokens=16)
    assert is_alike(ours, replace(_statement(block_tokens=16), block_tokens=None))
    with pytest.raises(PeerRefused, match="does not state the block size"):
        is_alike(ours, replace(_statement(block_tokens=64), block_tokens=None))


def test_like_kernel_blocks_of_unlike_blocks_are_unlike():
    _, ours = ours_of(block_tokens=16)
    assert not is_alike(ours, _statement(block_tokens=16, physical_blocks_per_logical_kv_block=2))


def test_unstated_kernel_blocks_are_refused_where_the_backend_may_cut_blocks():
    _, ours = ours_of(block_tokens=16)
    unstated = replace(_statement(block_tokens=64), kernel_blocks_per_block=None, backend=None)
    assert not is_alike(ours, unstated)
    with pytest.raises(PeerRefused, match="may cut blocks"):
        is_alike(replace(ours, backend="FLASHINFER"), unstated)


def test_two_byte_keys_by_column_are_refused():
    _, ours = ours_of(block_tokens=16)
    by_column = replace(ours, key_order=KeyOrder.COLUMN_MAJOR)
    assert not is_alike(by_column, _statement(block_tokens=64)), "4 bytes an item: no AMX"
    halves = dict(ours.layers)
    for name, cache in ours.layers.items():
        planes = tuple(replace(p, item_bytes=2) for p in cache.planes)
        halves[name] = replace(cache, planes=planes)
    with pytest.raises(PeerRefused, match="AMX"):
        is_alike(replace(by_column, layers=halves), _statement(block_tokens=64))


class TestRequests:
    """Blocks that do not hold the tokens, or lie outside the peer, are refused."""

    @pytest.fixture
    def ours(self):
        return ours_of()[1]

    def _plan(self, ours, tokens, local, remote, held=None):
        statement = _statement()
        planes = [plane for layer in ours.layers.values() for plane in layer.planes]
        crossings = cross(peer_regions(ours, statement), planes)
        order = Order(tokens, held or tokens, (local,), (remote,))
        groups = (Group(frozenset("ab"), window_tokens=0),)
        shares = shares_of(ours, groups, statement, crossings, order)
        return plan_runs((s.segments, [c for x in s.crossings for c in x.copies]) for s in shares)

    def test_all_bytes_of_all_tokens_are_planned(self, ours):
        plan = self._plan(ours, 100, tuple(range(7)), (3, 1))
        assert plan.copied_bytes == 100 * TOKEN * 2

    def test_a_prefix_hit_is_left_out(self, ours):
        plan = self._plan(ours, 100, (5, 6), (3, 1))
        assert plan.copied_bytes == (100 - 80) * TOKEN * 2

    @pytest.mark.parametrize("remote", [(3, 6), (3, 1000)])
    def test_a_block_that_the_peer_does_not_have(self, ours, remote):
        with pytest.raises(ReadRefused, match="which has 6"):
            self._plan(ours, 100, tuple(range(7)), remote)

    def test_more_blocks_than_the_prompt_fills(self, ours):
        with pytest.raises(ReadRefused, match="no more than it fills"):
            self._plan(ours, 16, (1, 2), (3,))

    def test_a_prompt_that_the_peer_has_only_a_part_of(self, ours):
        with pytest.raises(ReadRefused, match="same prompt"):
            self._plan(ours, 101, tuple(range(7)), (3, 1), held=100)


@pytest.mark.parametrize(
    ("tokens", "mamba", "refused"),
    [(16, False, True), (64, False, False), (32, False, False), (16, True, False)],
)
def test_smaller_blocks_are_refused_where_nobody_reads_them_rightly(tokens, mamba, refused):
    worker = SimpleNamespace(block_size=32, _has_mamba=mamba)
    peer = SimpleNamespace(block_size=tokens, engine_id="P")
    if not refused:
        refuse_smaller_blocks(worker, peer)
        return
    with pytest.raises(PeerRefused, match="--block-size"):
        refuse_smaller_blocks(worker, peer)
