"""What a peer may state at the handshake, and what is refused of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvpatch.core.errors import PeerRefused, ReadRefused, UnexpectedRead, UnlikePrompts
from kvpatch.core.releases import FACTS
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import NAMED_LAYOUTS
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Content, Memory
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.token_pairing import shares_of
from kvpatch.peer import statement as unstated
from kvpatch.peer.agent_metadata import read_agent_metadata
from kvpatch.peer.decision import LocalCache, Read, decide, is_compatible
from kvpatch.peer.homogeneous_view import (
    block_bytes_as_ours,
    check_descriptors,
    homogeneous_metadata,
)
from kvpatch.peer.remote_geometry import peer_regions
from kvpatch.worker.kv_cache_groups import Group, hides_ends_of_lists
from kvpatch.worker.local_geometry import (
    KernelBlockSizes,
    LocalGeometry,
    cross_layer_groups_of,
    missed_page,
    readers_of_regions,
    units_of,
)
from kvpatch.worker.registered_caches import read_layers
from kvpatch.worker.release_worker import PACKED
from tests.geometry.whole_caches import CacheSizes, named_layout

from .release_workers import reading, worker_of

HEADS, CHANNELS, ITEM = 4, 8, 4
NEWEST = FACTS["0.33.0"]
#: Regions of two layers, by layout.
_COUNTS = {"LBHNC": 2, "LBNHC": 2, "LHBNC": 8, "BLHNC": 2, "BLNHC": 1, "BHLNC": 1}
TOKEN = HEADS * 2 * CHANNELS * ITEM


def ours_of(block_tokens=16, layout="LBHNC", tp_size=1, names="ab"):
    heads = HEADS // tp_size
    tensors = {n: torch.zeros(10, heads, block_tokens, 2 * CHANNELS) for n in names}
    layers = read_layers(reading(PACKED, len(names)), tensors)
    return LocalGeometry(
        layers=layers,
        addresses=tuple(t.data_ptr() for t in tensors.values()),
        block_bytes=(block_tokens * TOKEN // tp_size,) * len(names),
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
        facts=NEWEST,
        units=units_of(layers),
        cross_layer_groups=(tuple(names),),
    )


def planes_of(geometry):
    return [plane for layer in geometry.layers.values() for plane in layer.planes]


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
        "ssm_sizes": (),
        "region_num_blocks": None,
        "region_names": None,
        "region_mem_types": None,
        "packed_member_layouts": {},
    }
    return SimpleNamespace(**{**stated, **changes})


def _stated(rank=0, size=1, **changes):
    return read_agent_metadata(_metadata(**changes), NEWEST, rank, size)


def stating(size=1, block_tokens=16, layout="LBHNC", **changes):
    """Returns what `size` ranks state without a backend; `changes` are to what has been read."""
    peer = _stated(0, size, block_tokens=block_tokens, kv_cache_layout=layout)
    return replace(peer, **{"backend": None, **changes})


def _view(metadata, peer, ours, block_bytes, own_regions=None):
    return homogeneous_metadata(
        metadata, peer, ours, block_bytes, own_regions or {}, most_blocks=1 << 40
    )


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
        _stated(**changes)


def test_a_refusal_has_both_geometries_and_what_helps():
    ours, lengths = ours_of(), [4096, 4096]
    peer = _stated(block_lens=lengths, block_strides=lengths)
    refused = decide(LocalCache(ours, planes_of(ours)), peer, NEWEST)

    assert isinstance(refused, PeerRefused)
    message = str(refused)
    assert "blocks of 64 tokens" in message and "blocks of 16 tokens" in message
    assert "4096" in message and "--kv-cache-dtype" in message


def regions_of(layout, block_tokens=64, heads=HEADS, layers=2):
    """What a stock worker states of a cache in one buffer, by the rules of the release."""
    page, blocks, start = block_tokens * heads * 2 * CHANNELS * ITEM, 6, 1 << 20
    if layout in ("LBHNC", "LBNHC"):
        places = [(start + i * blocks * page, page, page) for i in range(layers)]
    elif layout == "LHBNC":
        head = page // heads
        places = [(start + i * blocks * head, head, head) for i in range(layers * heads)]
    elif layout == "BLHNC":
        places = [(start + i * page, page, layers * page) for i in range(layers)]
    else:
        places = [(start, layers * page, layers * page)]
    addresses, lengths, strides = (list(column) for column in zip(*places, strict=True))
    return {
        "kv_cache_layout": layout,
        "kv_caches_base_addr": addresses,
        "block_lens": lengths,
        "block_strides": strides,
    }


def _rows(planes):
    """How each head of each layer lies, however planes divide the heads."""
    return {
        (plane.layer, plane.content, plane.first_head + head): (
            plane.address + head * plane.strides_bytes.head,
            plane.strides_bytes._replace(head=0),
            plane.counts._replace(heads=1),
        )
        for plane in planes
        for head in range(plane.counts.heads)
    }


class TestNamedLayouts:
    """From 0.29: regions follow from the layout's name."""

    @pytest.mark.parametrize("layout", NAMED_LAYOUTS)
    @pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (2, 4)])
    def test_every_head_is_where_the_layout_puts_it(self, layout, rank, size):
        heads = HEADS // size
        regions = regions_of(layout, heads=heads, layers=3)
        peer = _stated(rank, size, **regions)
        sizes = CacheSizes(3, 6, heads, 64, CHANNELS, ITEM)
        expected = named_layout(layout).planes(
            sizes, 1 << 20, Memory("DRAM"), first_head=rank * heads
        )

        ours = ours_of(names=("layer.0", "layer.1", "layer.2"))
        found = [plane for region in peer_regions(ours, peer) for plane in region]

        assert _rows(found) == _rows(expected)

    @pytest.mark.parametrize("layout", ["LHBNC", "BLHNC"])
    def test_names_tell_the_order_of_the_regions(self, layout):
        regions = regions_of(layout)
        count = len(regions["kv_caches_base_addr"]) // 2
        swapped = _stated(**regions, region_names=["b"] * count + ["a"] * count)
        unnamed = _stated(**regions)

        def start(peer, layer):
            planes = [p for region in peer_regions(ours_of(), peer) for p in region]
            return min(p.address for p in planes if p.layer == layer)

        assert start(swapped, "b") == start(unnamed, "a")
        assert start(swapped, "a") == start(unnamed, "b")

    @pytest.mark.parametrize(
        ("layout", "names", "words"),
        [
            ("", ["a", "c"], "regions are named"),
            ("", ["a", "a"], "has two regions"),
            ("", ["a"], "names for 2"),
            ("", ["a", "b", "a"], "names for 2"),
            ("", [], "names for 2"),
            ("LHBNC", ["a"] * 3 + ["b"] * 5, "one model"),  # a region of two layers
        ],
    )
    def test_names_that_are_not_our_layers(self, layout, names, words):
        regions = regions_of(layout) if layout else {}
        with pytest.raises(PeerRefused, match=words):
            peer_regions(ours_of(), _stated(**regions, region_names=names))

    @pytest.mark.parametrize(
        ("stated", "regions"),
        [
            (a, b)
            for a in NAMED_LAYOUTS
            for b in NAMED_LAYOUTS
            # Rows of BLHNC are what latents have.
            if _COUNTS[a] != _COUNTS[b] and not (a == "BLHNC" and _COUNTS[b] == 1)
        ],
    )
    def test_regions_of_another_layout_are_refused(self, stated, regions):
        found = {**regions_of(regions), "kv_cache_layout": stated}
        with pytest.raises(PeerRefused, match=f"layout {stated}"):
            peer_regions(ours_of(), _stated(**found))

    @pytest.mark.parametrize("layout", NAMED_LAYOUTS)
    @pytest.mark.parametrize("change", [ITEM, -ITEM])
    def test_blocks_of_other_lengths_are_refused(self, layout, change):
        regions = regions_of(layout)
        regions["block_lens"][-1] += change  # padding, or a narrower cache
        regions["block_strides"][-1] += ITEM
        with pytest.raises(PeerRefused, match="--kv-cache-dtype"):
            peer_regions(ours_of(), _stated(**regions))

    @pytest.mark.parametrize("layout", ["BLNHC", "BHLNC"])
    def test_a_row_is_read_in_the_order_of_the_plan(self, layout):
        ours, peer = ours_of(), _stated(**regions_of(layout))
        turned = peer_regions(replace(ours, cross_layer_groups=(("b", "a"),)), peer)
        first = min((p for region in turned for p in region), key=lambda plane: plane.address)
        assert first.layer == "b"
        with pytest.raises(PeerRefused, match="whose order is not known"):
            peer_regions(replace(ours, cross_layer_groups=None), peer)

    @pytest.mark.parametrize(
        ("layout", "plan", "groups", "expected"),
        [
            ("LBHNC", ("ab",), ("ab",), ("ab",)),
            ("LBHNC", ("b", "a"), ("ab",), ("ba",)),
            ("BLNHC", ("a", "b"), ("ab",), ("ab",)),
            ("BLNHC", ("b", "a"), ("ab",), None),
            ("LBHNC", ("a",), ("ab",), None),
            ("LBHNC", ("ab", "a"), ("ab",), None),
            ("LBHNC", ("a", "b"), ("b", "a"), ("b", "a")),
            ("LBHNC", ("a", "s", "b"), ("ab", "s"), ("ab",)),
            ("LBHNC", ("a", "s", "b"), ("as", "b"), None),
        ],
    )
    def test_the_order_of_a_row_is_the_plans(self, layout, plan, groups, expected):
        whole = torch.zeros(10, 2, HEADS, 16, 2 * CHANNELS)
        layers = read_layers(reading(PACKED, 2), {"a": whole[:, 0], "b": whole[:, 1]})
        tensors = [SimpleNamespace(layers=list(names)) for names in plan]
        found = [SimpleNamespace(layer_names=list(names)) for names in groups]
        config = SimpleNamespace(kv_cache_tensors=tensors, transfer_groups=found)
        worker = worker_of("0.29.0", kv_cache_config=config)
        rows = None if expected is None else tuple(map(tuple, expected))
        assert cross_layer_groups_of(worker, layers, layout) == rows

    def test_a_row_whose_order_the_peer_contradicts_is_refused(self):
        ours = ours_of()
        regions = regions_of("BLNHC")
        page = regions["block_lens"][0] // 2
        told = {"a": (0, page), "b": (page, page)}
        turned = {"a": (page, page), "b": (0, page)}
        assert peer_regions(ours, _stated(**regions, packed_member_layouts=told))
        with pytest.raises(PeerRefused, match="another way"):
            peer_regions(ours, _stated(**regions, packed_member_layouts=turned))

    @pytest.mark.parametrize("found", [[1], {"a": 1}, {"a": (0,)}, {1: (0, 1)}, {"a": (0, -1)}])
    def test_packed_layers_of_no_meaning(self, found):
        with pytest.raises(PeerRefused, match="packed_member_layouts"):
            _stated(packed_member_layouts=found)

    def test_heads_outside_blocks_are_no_pieces_of_a_block(self):
        for layout, alike in (("LBHNC", True), ("LHBNC", False), ("BHLNC", False)):
            ours = ours_of(layout=layout, tp_size=2)
            peer = _stated(block_tokens=16, kv_cache_layout=layout)
            assert is_compatible(ours, peer) is alike, layout

    @pytest.mark.parametrize("stated", ["LBNHC", "LBHNC"])
    def test_mla_has_no_heads_to_be_unlike(self, stated):
        """So that the release reads it, a P with decode context parallelism too."""
        ours = ours_of(layout="LBNHC")
        latents = {
            name: replace(
                cache, planes=tuple(replace(p, content=Content.LATENT) for p in cache.planes[:1])
            )
            for name, cache in ours.layers.items()
        }
        peer = _stated(1, 4, block_tokens=16, kv_cache_layout=stated)
        assert is_compatible(replace(ours, layers=latents, inner_layout="NHD"), peer)
        assert not is_compatible(replace(ours, inner_layout="NHD"), peer)

    @pytest.mark.parametrize("count", [1, 3, 8])
    @pytest.mark.parametrize("layout", NAMED_LAYOUTS)
    def test_the_peer_like_us_has_as_many_regions_as_we_do(self, layout, count):
        regions = regions_of(layout)
        peer = _stated(**regions)
        own = {"region_names": ["x"] * count, "packed_member_layouts": {"x": (0, 1)}}
        metadata = _metadata(**regions, region_names=["a"], packed_member_layouts={})
        alike = _view(metadata, peer, ours_of(), (4096,) * count, own)

        start, end = 1 << 20, (1 << 20) + 2 * 6 * 64 * TOKEN
        assert len(alike.kv_caches_base_addr) == len(alike.block_lens) == count
        for address, length in zip(alike.kv_caches_base_addr, alike.block_lens, strict=True):
            assert start <= address and address + alike.num_blocks * length <= end
        assert (alike.region_names, alike.packed_member_layouts) == tuple(own.values())

    def test_our_rows_find_room_over_regions_that_touch(self):
        """A head's region of the peer's is smaller than a row of ours."""
        peer = _stated(**regions_of("LHBNC"))
        row = 3 * peer.blocks * peer.block_bytes[0]
        alike = _view(_metadata(), peer, ours_of(), (row,))
        assert alike.num_blocks == 2
        with pytest.raises(PeerRefused, match="more KV cache"):
            _view(_metadata(), peer, ours_of(), (3 * row,))


def test_the_peer_like_us_lies_within_what_the_peer_registered():
    ours = ours_of(block_tokens=48)
    peer = _stated(block_tokens=64, blocks=7)
    alike = _view(_metadata(blocks=7), peer, ours, block_bytes_as_ours(ours, peer))

    assert alike.block_size == 48
    assert alike.num_blocks * alike.block_lens[0] <= 7 * peer.block_bytes[0]
    assert (alike.num_blocks + 1) * alike.block_lens[0] > 7 * peer.block_bytes[0]


def test_a_peer_of_more_blocks_than_can_be_prepared_for_is_refused():
    worker = SimpleNamespace(num_blocks=100)
    check_descriptors(worker, NEWEST, _metadata(blocks=1 << 23))
    with pytest.raises(PeerRefused, match="16777218 blocks in 2 regions"):
        check_descriptors(worker, NEWEST, _metadata(blocks=(1 << 23) + 1))
    with pytest.raises(PeerRefused, match="are the most"):
        check_descriptors(worker, NEWEST, _metadata(region_num_blocks=[1, 1 << 40]))
    check_descriptors(SimpleNamespace(num_blocks=1 << 22), NEWEST, _metadata(blocks=1 << 25))
    # vLLM's own tests shake hands with a worker that has registered nothing.
    check_descriptors(SimpleNamespace(), NEWEST, _metadata(blocks=1 << 10))


def _completed(ours, stated):
    return unstated.complete(ours, stated, unstated.declared_geometry())


def _to_0110(ours, **changes):
    stated = replace(_stated(**changes), block_tokens=None, kernel_blocks_per_block=None)
    return _completed(ours, stated)


def test_bytes_that_are_no_whole_tokens_are_refused():
    for lengths in ([16 * TOKEN, 16 * TOKEN + 4], [16 * TOKEN, 32 * TOKEN]):
        with pytest.raises(PeerRefused, match="no whole number of our tokens"):
            _to_0110(ours_of(), block_lens=lengths)


def test_an_unstated_layout_is_open_where_there_are_heads_and_tokens():
    ours = ours_of()
    peer = _to_0110(ours, kv_cache_layout=None).peer
    by_column = replace(ours, key_order=KeyOrder.COLUMN_MAJOR)

    assert _completed(ours, peer).variables == ("KVPATCH_PEER_LAYOUT",)
    assert not _completed(ours, replace(peer, layout="HND")).variables
    assert not _completed(ours, replace(peer, tp_size=ours.total_heads)).variables
    assert not _completed(by_column, peer).variables


@pytest.mark.parametrize(
    ("blocks", "own", "expected"),
    [(40, 1, (1, True, True)), (40, 4, (4, True, True)), (42, 4, (1, True, False)),
     (41, 1, (1, False, True)), (41, 4, (1, False, True))],
)  # fmt: skip
def test_unstated_kernel_blocks_are_as_many_as_a_backend_and_the_number_of_blocks_allow(
    blocks, own, expected
):
    """An odd number of kernel blocks is cut in one way; else they are taken for as many as ours."""
    ours = ours_of(block_tokens=64)
    sizes = KernelBlockSizes(((16, 32, 64),), ((),), blocks=(16, 32, 64, 128, 256))
    cut = replace(ours, kernel_sizes=sizes, kernel_blocks_per_block=own)
    stated = replace(_stated(block_tokens=64), kernel_blocks_per_block=None, backend=None)

    found = _completed(cut, replace(stated, blocks=blocks))

    assert (found.peer.kernel_blocks_per_block, found.is_open, found.is_like) == expected


def test_declared_blocks_leave_one_number_of_kernel_blocks(monkeypatch):
    ours = ours_of(block_tokens=64)
    cut = replace(ours, kernel_sizes=KernelBlockSizes(((16, 32, 64),), ((),)))
    stated = replace(_stated(block_tokens=64), kernel_blocks_per_block=None, blocks=40)
    monkeypatch.setenv("KVPATCH_PEER_BLOCK_SIZE", "128")
    found = _completed(cut, stated)
    assert not found.is_open and found.peer.kernel_blocks_per_block == 2
    monkeypatch.setenv("KVPATCH_PEER_BLOCK_SIZE", "96")
    with pytest.raises(PeerRefused, match="comes to kernel blocks of 64 tokens"):
        _completed(cut, stated)


@pytest.mark.parametrize(
    ("tokens", "held", "local", "remote", "refusal", "words"),
    [
        (100, 100, range(7), (3, 6), ReadRefused, "which has 6"),
        (100, 100, range(7), (3, 1000), ReadRefused, "which has 6"),
        (16, 16, (1, 2), (3,), UnexpectedRead, "no more than it fills"),
        (100, 100, range(7), (3,), UnlikePrompts, "for 64 tokens, and the prompt has 100: pass on"),
        (101, 100, range(7), (3, 1), ReadRefused, "same prompt"),
    ],
)
def test_blocks_that_do_not_hold_the_tokens(tokens, held, local, remote, refusal, words):
    ours, peer = ours_of(), _stated()
    overlaps = overlaps_of(peer_regions(ours, peer), planes_of(ours))
    request = ReadRequest(tokens, held, (tuple(local),), (remote,))
    groups = (Group(frozenset("ab"), window_tokens=0),)

    with pytest.raises(refusal, match=words):
        list(shares_of(ours, groups, peer, overlaps, request))


def _drafting():
    """Ours, with a draft model of half the heads and half the channels in layer b."""
    tensors = {"a": torch.zeros(10, HEADS, 16, 2 * CHANNELS), "b": torch.zeros(10, 2, 16, CHANNELS)}
    layers = read_layers(reading(PACKED, 2), tensors)
    addresses = tuple(tensor.data_ptr() for tensor in tensors.values())
    return replace(ours_of(), layers=layers, addresses=addresses, units=units_of(layers))


@pytest.mark.parametrize("block_tokens", [8, 48, 64])
@pytest.mark.parametrize("names", [None, ["a", "b"]])
def test_a_draft_models_layers_have_regions_of_their_own_bytes(block_tokens, names):
    lengths = [block_tokens * TOKEN, block_tokens * TOKEN // 4]
    stated = _stated(
        block_size=block_tokens, block_lens=lengths, block_strides=lengths, region_names=names
    )

    found = [region[0] for region in peer_regions(_drafting(), stated)]

    assert [(p.layer, p.address, p.counts.block_tokens, p.counts.heads) for p in found] == [
        ("a", 1 << 20, block_tokens, HEADS),
        ("b", 1 << 30, block_tokens, 2),
    ]


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        # A region's bytes are off by a token's; both are, alike; two regions have changed places.
        ({"block_lens": [64 * TOKEN, 65 * TOKEN // 4]}, (0, 1), "not to"),
        ({"block_lens": [63 * TOKEN, 16 * TOKEN]}, (0, 1), "not to"),
        ({"block_lens": [65 * TOKEN, 65 * TOKEN // 4]}, (0, 1), "not to"),
        ({"block_lens": [16 * TOKEN, 64 * TOKEN]}, (0, 1), "not to"),
        ({"region_names": ["b", "a"]}, (0, 1), "not to"),
        ({"region_names": ["a", "c"]}, (0, 1), "regions are named c"),
        ({"physical_blocks_per_logical_kv_block": 2}, (0, 1), "cut into kernel blocks"),
        ({}, (0, 2), "numbers of KV heads are read from as many"),
    ],
)
def test_a_draft_models_layers_are_refused(changes, ranks, words):
    lengths = [64 * TOKEN, 16 * TOKEN]
    changes = {"block_lens": lengths, "region_names": ["a", "b"], **changes}
    changes["block_strides"] = changes["block_lens"]

    with pytest.raises(PeerRefused, match=words):
        peer_regions(_drafting(), _stated(*ranks, **changes))


def test_pages_of_several_sizes_are_of_one_group():
    ours = replace(_drafting(), groups=(frozenset("a"), frozenset("b")))
    lengths = [64 * TOKEN, 16 * TOKEN]

    with pytest.raises(PeerRefused, match="ours are in several groups"):
        peer_regions(ours, _stated(block_lens=lengths, block_strides=lengths))


@pytest.mark.parametrize(
    ("method", "windows", "refused"),
    [
        ("eagle", (64,), True),
        ("mtp", (64, 128), True),
        ("eagle", (64, 0), False),  # full attention tells where a table ends
        ("ngram", (64,), False),
        (None, (64,), False),
    ],
)
def test_windows_alone_with_a_draft_model(method, windows, refused):
    speculation = None if method is None else SimpleNamespace(method=method)
    config = SimpleNamespace(speculative_config=speculation)
    groups = [Group(frozenset("ab"), window) for window in windows]
    ours = ours_of()
    hides_ends = hides_ends_of_lists(
        config, groups, layers_differ_in_shape=ours.layers_differ_in_shape
    )
    local = LocalCache(ours, planes_of(ours), hides_ends=hides_ends)
    found = decide(local, _stated(), FACTS["0.20.1"])
    if not refused:
        assert isinstance(found, Read)
        return
    assert isinstance(found, PeerRefused)
    assert "drafted tokens" in found.reason


_A, _B = frozenset("a"), frozenset("b")


@pytest.mark.parametrize(
    ("readers", "missed"),
    [
        ((), None),
        ((None, None), None),
        ((None, _B), None),
        ((None, _A), "b"),  # the region at b's page is of another group
        ((_B, None), "a"),
    ],
)
def test_a_page_is_missed_where_no_region_is_read_for_its_group(readers, missed):
    pages = {"a": (0, 64), "b": (64, 64)}

    assert missed_page(pages, (0, 64), (64, 64), readers) == missed
    assert missed_page({"b": (64, 128)}, (0, 64), (64, 64), readers) == "b"


@pytest.mark.parametrize(
    ("changes", "numbers", "readers"),
    [
        ({}, [-1, 1], (None, _B)),
        ({"_has_mamba": True}, [-1, 1], ()),
        ({"_uses_region_group_mapping": False}, [0, 0], ()),
    ],
)
def test_the_readers_of_regions_are_the_layers_of_their_groups(changes, numbers, readers):
    groups = [SimpleNamespace(layer_names=[name]) for name in "ab"]
    stated = {"_has_mamba": False, "_uses_region_group_mapping": True, **changes}
    plan = SimpleNamespace(kv_cache_groups=groups, transfer_groups=groups)
    worker = worker_of("0.33.0", region_group_ids=numbers, kv_cache_config=plan, **stated)

    assert readers_of_regions(worker) == readers
    assert readers_of_regions(worker_of("0.29.0")) == ()
