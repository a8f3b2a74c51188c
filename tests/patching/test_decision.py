"""The decision of a handshake, a row for each way to differ that the lab does not play."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import FACTS
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import NAMED_LAYOUTS
from kvpatch.geometry.state_shares import Part, SharedState
from kvpatch.peer.agent_metadata import (
    AgentMetadata,
    CrossLayerForm,
    StatedBlocks,
    read_agent_metadata,
)
from kvpatch.peer.decision import LocalCache, Read, Stock, decide
from kvpatch.peer.remote_geometry import peer_regions
from kvpatch.peer.statement import DeclaredGeometry
from kvpatch.peer.unread_caches import PlannedHeads, UnreadCache
from kvpatch.worker.cache_kinds import Holds, Kind, unknown
from kvpatch.worker.local_geometry import KernelBlockSizes, units_of
from kvpatch.worker.recurrent_state import StateDivision, StatePages
from kvpatch.worker.registered_caches import read_layers
from kvpatch.worker.release_worker import PACKED

from .release_workers import reading
from .test_remote_geometry import TOKEN, _metadata, ours_of, planes_of, regions_of, stating

NEWEST, OLDEST = FACTS["0.33.0"], FACTS["0.10.0"]
PEER = stating()
UNREAD = UnreadCache(16, 1, "LBHNC", "STRANGE")


def local(**changes: Any) -> LocalCache:
    """Blocks of 16 tokens, 4 heads, layout LBHNC, one rank; `changes` are its geometry's."""
    cache = {key: changes.pop(key) for key in _OF_CACHE & changes.keys()}
    geometry = replace(ours_of(), **changes)
    return LocalCache(geometry, planes_of(geometry), **cache)


_OF_CACHE = {
    "staging_bytes", "reads_all", "hides_ends", "has_sure_layout", "declared",
    "is_plain", "stages",
}  # fmt: skip


def peer(rank: int = 0, size: int = 1, **changes: Any) -> AgentMetadata:
    """Like `local`, but for what is stated otherwise."""
    return read_agent_metadata(_metadata(**{"block_tokens": 16, **changes}), NEWEST, rank, size)


def unstated(**changes: Any) -> AgentMetadata:
    """As a release states it that says neither what a block holds nor how it is cut."""
    return replace(peer(**changes), block_tokens=None, kernel_blocks_per_block=None)


def by_column(**changes: Any) -> LocalCache:
    return local(key_order=KeyOrder.COLUMN_MAJOR, **changes)


def of_two_bytes(order: KeyOrder = KeyOrder.COLUMN_MAJOR, **changes: Any) -> LocalCache:
    """bfloat16, heads of 32 channels: a CPU with AMX has them in tiles."""
    shape = 10, 4, 32, 64
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in "ab"}
    layers = read_layers(reading(PACKED, 2), tensors, order)
    return local(
        layers=layers,
        addresses=tuple(tensor.data_ptr() for tensor in tensors.values()),
        units=units_of(layers),
        block_tokens=32,
        block_bytes=(2 * prod(shape[1:]),) * 2,
        key_order=order,
        **changes,
    )


def peer_of_two_bytes(block_tokens: int) -> AgentMetadata:
    lengths = [2 * 4 * block_tokens * 64] * 2
    return peer(block_tokens=block_tokens, block_lens=lengths, block_strides=lengths)


def whole(kind: Kind) -> LocalCache:
    found = local()
    layers = {
        name: replace(
            cache, kind=kind, planes=tuple(replace(p, is_whole=True) for p in cache.planes)
        )
        for name, cache in found.geometry.layers.items()
    }
    geometry = replace(found.geometry, layers=layers)
    return replace(found, geometry=geometry, planes=planes_of(geometry))


def one_head(ranks: int) -> LocalCache:
    """A rank's cache with one of 4 heads, of more ranks, in LBNHC."""
    geometry = replace(
        ours_of(tp_size=4), tp_size=ranks, total_heads=4, layout="LBNHC", inner_layout="NHD"
    )
    return LocalCache(geometry, planes_of(geometry))


def of_one_head(ranks: int) -> AgentMetadata:
    lengths = list(one_head(8).geometry.block_bytes)
    stated = {"kv_cache_layout": "LBNHC", "block_lens": lengths, "block_strides": lengths}
    return peer(0, ranks, **stated)


def local_with_states(*division: StateDivision) -> LocalCache:
    """Our side, whose states begin where its first layer does."""
    found = local()
    states = {"m": StatePages(found.geometry.addresses[0], 4096, 10, (1024,), *division)}
    return replace(found, geometry=replace(found.geometry, states=states))


_COPIED = StateDivision((SharedState(8, (Part(64), Part(64, is_copied=True))),), reason="")


_INDEXER = Kind(Holds.WHOLE, "an indexer's values and scales")
_POOLED = Kind(Holds.WHOLE, "several positions to a token", joins=True)
_STRANGE = unknown("strange.Backend")
_CUTS = KernelBlockSizes(((16, 32, 64),), ((),), blocks=(16, 32, 64, 128, 256))

#: name: our side, the peer, what becomes of it; of a refusal the words of its cure.
READ: dict[str, tuple[Callable[[], LocalCache], Callable[[], AgentMetadata], Any]] = {
    "like us": (local, peer, Stock),
    "larger blocks": (local, lambda: peer(block_tokens=64), Read),
    "smaller blocks": (local, lambda: peer(block_tokens=8), Read),
    "blocks of no multiple": (local, lambda: peer(block_tokens=48), Read),
    "tokens before heads": (local, lambda: peer(kv_cache_layout="LBNHC"), Read),
    "cross-layer blocks": (local, lambda: peer(**regions_of("BLHNC", block_tokens=16)), Read),
    "heads outside blocks": (local, lambda: peer(**regions_of("LHBNC", block_tokens=16)), Read),
    "ranks whose heads are pieces": (local, lambda: peer(1, 2), Stock),
    "tokens before heads, one head on each rank, which vLLM takes for several": (
        lambda: one_head(8), lambda: of_one_head(4), Read,
    ),
    "tokens before heads, one head on each rank of more than there are heads": (
        lambda: one_head(16), lambda: of_one_head(8), Stock,
    ),
    "ranks that share heads": (local, lambda: peer(5, 8, block_lens=[1024] * 2), Read),
    "cut in the only way that there is": (
        lambda: local(kernel_sizes=_CUTS), lambda: replace(peer(), kernel_blocks_per_block=None),
        Stock,
    ),
    "cut in a way that nobody knows": (
        local, lambda: replace(peer(block_tokens=64), kernel_blocks_per_block=None),
        "set KVPATCH_PEER_BLOCK_SIZE to the --block-size of P",
    ),
    "like us, and all is ours": (lambda: local(reads_all=True), peer, Read),
    "memory of two kinds": (
        local, lambda: peer(region_mem_types=["DRAM", "VRAM"]), "on one device or on the host",
    ),
    "a layout of no name": (
        local, lambda: peer(kv_cache_layout="NOPE"), "VLLM_KV_CACHE_LAYOUT",
    ),
    "bytes of another model": (
        local, lambda: peer(block_tokens=64, block_lens=[8192] * 2), "pages without padding",
    ),
    "regions of another model": (
        local,
        lambda: peer(
            block_tokens=64, kv_caches_base_addr=[1 << 20], block_lens=[65536],
            block_strides=[65536],
        ),
        "--pipeline-parallel-size",
    ),
    "another backend": (
        local, lambda: peer(block_tokens=64, attn_backend_name="FLASHINFER"),
        "VLLM_ATTENTION_BACKEND",
    ),
    "another backend whose rows lie elsewhere": (
        local, lambda: peer(attn_backend_name="CPU_ATTN"), "KVPATCH_ACCEPT=attn_backend",
    ),
    "a device's backend beside a CPU's, which vLLM reorders": (
        lambda: by_column(backend="CPU_ATTN"), peer, Stock,
    ),
    "keys by column beside a backend that the table lacks": (
        lambda: local(backend="ROCM_AITER_FA"), lambda: peer(attn_backend_name="CPU_ATTN"),
        "KVPATCH_ACCEPT=attn_backend",
    ),
    "keys by column": (by_column, lambda: peer(block_tokens=64), Read),
    "keys by column, tokens before heads": (
        by_column, lambda: peer(kv_cache_layout="LBNHC"), "use LBHNC on P",
    ),
    "keys by column that AMX may tile": (
        of_two_bytes, lambda: peer_of_two_bytes(64), "--dtype float32",
    ),
    "whole blocks of another size": (
        lambda: whole(_INDEXER), lambda: peer(block_tokens=64), "use one --block-size",
    ),
    "whole blocks, like us": (lambda: whole(_INDEXER), peer, Stock),
    "a kind that nobody knows": (
        lambda: whole(_STRANGE), lambda: peer(block_tokens=64),
        "VLLM_KV_CACHE_LAYOUT on both sides",
    ),
    "a kind that nobody knows, like us": (lambda: whole(_STRANGE), peer, Stock),
    "a kind that nobody knows, cut into parts": (
        lambda: whole(_STRANGE), lambda: peer(physical_blocks_per_logical_kv_block=2),
        "VLLM_KV_CACHE_LAYOUT on both sides",
    ),
    "a kind that nobody knows, of other ranks": (
        lambda: whole(_STRANGE), lambda: peer(0, 2), "VLLM_KV_CACHE_LAYOUT on both sides",
    ),
    "a kind that nobody knows, in another layout": (
        lambda: whole(_STRANGE), lambda: peer(kv_cache_layout="LBNHC"),
        "VLLM_KV_CACHE_LAYOUT on both sides",
    ),
    "ranks that share out tokens": (
        local, lambda: replace(peer(block_tokens=64), shares_tokens=True),
        "--decode-context-parallel-size 1",
    ),
    "like us, with ranks that share out tokens": (
        local, lambda: replace(peer(), shares_tokens=True), Stock,
    ),
    "a device without storage": (
        lambda: local(has_sure_layout=False), lambda: peer(kv_cache_layout="LBNHC"),
        "set ENABLE_KVPATCH there too",
    ),
    "a device without storage, like us": (lambda: local(has_sure_layout=False), peer, Stock),
    "not the blocks that are declared": (
        lambda: local(declared=DeclaredGeometry(64)), lambda: peer(block_tokens=32),
        "the --block-size of P",
    ),
    "not the layout that is declared": (
        lambda: local(declared=DeclaredGeometry(layout="NHD")), peer, "set it to what P has",
    ),
    "state of which each rank has a part whole, by its bytes shared out": (
        lambda: local_with_states(_COPIED),
        lambda: peer(1, 2, block_lens=[2048] * 2, ssm_sizes=(512,)),
        "use one model, --dtype",
    ),
    "state that nobody can divide": (
        local_with_states,
        lambda: peer(1, 2, block_lens=[2048] * 2, ssm_sizes=(512,)),
        "use one --tensor-parallel-size on both sides",
    ),
}  # fmt: skip


def _says(found: object, expected: Any) -> None:
    if isinstance(expected, type):
        assert isinstance(found, expected), found
        return
    assert isinstance(found, PeerRefused), found
    assert expected in found.cure
    assert str(found) == f"{found.reason}: {found.cure}"
    assert "engine" in found.reason and "cannot be read" in found.reason


@pytest.mark.parametrize("name", READ)
def test_what_becomes_of_a_peer(name: str) -> None:
    ours, theirs, expected = READ[name]

    _says(decide(ours(), theirs(), NEWEST), expected)


def test_a_mapping_says_where_the_peers_layers_lie() -> None:
    found = decide(local(), peer(block_tokens=64), NEWEST)

    assert isinstance(found, Read)
    assert found.mapping.block_tokens == {"a": 64, "b": 64}
    assert len(found.mapping.overlaps) == 2
    assert {p.address >> 20 for p in found.mapping.planes} == {1, 1 << 10}


def _by_number(**changes: Any) -> LocalCache:
    """Our side on a release whose layouts have no names."""
    return local(layout="HND", units=None, **changes)


def _uncut(**changes: Any) -> AgentMetadata:
    return replace(peer(**changes), kernel_blocks_per_block=None)


def _muted(**changes: Any) -> AgentMetadata:
    """As 0.10.0 states it, which has no word for the layout either."""
    return replace(unstated(**changes), layout=None)


_SIZE, _LAYOUT, _KEYS = (f"KVPATCH_PEER_{name}" for name in ("BLOCK_SIZE", "LAYOUT", "KEYS"))
_CUT = {"kernel_sizes": _CUTS}
_LARGE = {"block_tokens": 64, "num_blocks": 40}

#: name: our side, what the peer states, what becomes of it, and the variables of the warning; of a
#: refusal the words of its cure. The lab plays what is declared or stated (test_unstated_blocks).
OPEN: dict[str, tuple[Callable[[], LocalCache], Callable[[], AgentMetadata], Any, Any]] = {
    "items of any size, like ours, and all is ours": (
        lambda: local(reads_all=True), unstated, Read, (_SIZE,),
    ),
    "items of a type that is stated": (
        lambda: local(dtype="bfloat16"),
        lambda: replace(unstated(), stated_blocks=StatedBlocks(16, 16, dtype="fp8_e4m3")),
        "one --dtype and --kv-cache-dtype", None,
    ),
    "other blocks than are stated": (
        local, lambda: replace(unstated(), stated_blocks=StatedBlocks(32, 32)),
        "--kv-cache-dtype", None,
    ),
    "either layout, and the blocks declared": (
        lambda: _by_number(declared=DeclaredGeometry(16)), _muted, Stock, (_LAYOUT,),
    ),
    "a layout that is declared": (
        lambda: _by_number(declared=DeclaredGeometry(16, "NHD")), _muted, Read, (),
    ),
    "any cut but ours": (
        lambda: local(**_CUT, block_tokens=64, kernel_blocks_per_block=3),
        lambda: _uncut(**_LARGE), f"set {_SIZE}", None,
    ),
    "a cut that is stated, of other kernel blocks": (
        lambda: local(**_CUT, block_tokens=64),
        lambda: replace(_uncut(**_LARGE), stated_blocks=StatedBlocks(64, 32)), "kvpatch on both",
        None,
    ),
    "a cut that nobody knows, like ours": (local, _uncut, Stock, (_SIZE,)),
    "a cut that nobody knows, declared": (
        lambda: local(declared=DeclaredGeometry(64)), lambda: _uncut(block_tokens=64), Read, (),
    ),
    "block sizes that are none": (
        lambda: local(misreads_blocks=True), lambda: replace(peer(), block_tokens=4),
        Stock, (_SIZE,),
    ),
    "another backend, which leaves nothing to be declared": (
        local, lambda: unstated(attn_backend_name="OTHER", block_tokens=64), "use one", None,
    ),
    "a CPU's keys, like ours": (
        of_two_bytes, lambda: peer_of_two_bytes(32), Stock, (_KEYS,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_what_becomes_of_a_peer_that_leaves_something_open(name: str) -> None:
    ours, theirs, expected, variables = OPEN[name]

    found = decide(ours(), theirs(), OLDEST)

    _says(found, expected)
    if not isinstance(found, PeerRefused):
        assert found.open_to == variables


@pytest.mark.parametrize("ours", [local(stages=2), replace(UNREAD, stages=2)])
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_no_stage_of_a_pipeline_reads_where_no_layers_are_named(
    ours: LocalCache | UnreadCache, block_tokens: int
) -> None:
    """From 0.30 on names are compared."""
    for release in ("0.10.0", "0.29.0"):
        _says(decide(ours, peer(block_tokens=block_tokens), FACTS[release]), "--pipeline-parallel")
    found = decide(ours, peer(block_tokens=block_tokens), FACTS["0.30.0"])
    assert not isinstance(found, PeerRefused), found


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC"])
@pytest.mark.parametrize("names", ["ab", "cd"])
def test_a_stage_of_a_pipeline_reads_its_own_layers_of_a_p_that_has_all(
    layout: str, names: str
) -> None:
    regions = regions_of(layout, layers=4)
    count = len(regions["kv_caches_base_addr"]) // 4
    theirs = peer(block_size=64, region_names=[n for n in "abcd" for _ in range(count)], **regions)
    geometry = replace(ours_of(names=names), region_names=tuple(names))

    found = decide(LocalCache(geometry, planes_of(geometry), stages=2), theirs, NEWEST)

    assert isinstance(found, Read), found
    whole = [plane for region in peer_regions(ours_of(names="abcd"), theirs) for plane in region]
    read = [plane for region in found.mapping.regions for plane in region]
    assert read == [plane for plane in whole if plane.layer in names]


def test_a_stage_of_a_pipeline_reads_no_layers_of_another_one() -> None:
    geometry = replace(ours_of(names="cd"), region_names=("c", "d"))
    ours = LocalCache(geometry, planes_of(geometry), stages=2)
    names = {"block_tokens": 64, "region_names": ["a", "b"]}
    _says(decide(ours, peer(**names), NEWEST), "--pipeline-parallel-size 1 on the prefill side")

    row = 2 * 64 * TOKEN
    form = str(CrossLayerForm(64, 1, ("head", "token", "kv", "channel")))
    rows = {"kv_cache_layout": form, "block_lens": [row], "block_strides": [row]}
    rows |= {"kv_caches_base_addr": [1 << 20], "block_tokens": 64}
    _says(decide(ours, peer(**rows, region_names=["a"]), NEWEST), "KVCACHED_CONTIGUOUS_LAYOUT")
    assert isinstance(decide(ours, peer(**rows, region_names=["c"]), NEWEST), Read)


def test_layers_of_cross_layer_blocks_are_found_where_p_says_that_they_are() -> None:
    row = {"kv_caches_base_addr": [4096], "block_lens": [900], "block_strides": [900]}
    places = {"a": (0, 300), "b": (300, 300), "c": (600, 300)}
    theirs = peer(**row, region_names=["a"], packed_member_layouts=places)

    found = theirs.of_layers(("b", "c"))

    assert (found.addresses, found.block_bytes) == ((4396, 4696), (300, 300))
    assert (found.stride_bytes, found.region_names) == ((900, 900), ("b", "c"))
    assert theirs.of_layers(("c", "d")) is theirs
    too_long = peer(**row, region_names=["a"], packed_member_layouts=places | {"c": (700, 300)})
    assert too_long.of_layers(("b", "c")) is too_long


#: 4 heads with full attention and 8 with windows, of which a rank of 8 has one each.
_MIMO = PlannedHeads(frozenset({(4, 1), (8, 1)}), is_one_shape=False)
_PAGES = PlannedHeads(frozenset({(4, 2), (8, 4)}), is_one_shape=False, overlays_pages=True)
#: name: a cache that we do not read into, the peer, and what becomes of it.
UNREAD_PEERS: dict[str, tuple[UnreadCache, AgentMetadata, Any]] = {
    "like us": (UNREAD, PEER, Stock),
    "other blocks": (UNREAD, replace(PEER, block_tokens=64), Stock),
    "memory of two kinds": (UNREAD, stating(memory_kinds=("DRAM", "VRAM")), Stock),
    "a host buffer that needs us": (
        replace(UNREAD, needs_reader=True), PEER, "KVPATCH_HOST_BUFFER=never",
    ),
    "packed keys, other blocks": (
        replace(UNREAD, knows_keys=False), peer(block_tokens=64), "one block size and layout",
    ),
    "packed keys, another layout": (
        replace(UNREAD, knows_keys=False), peer(kv_cache_layout="LBNHC"), "one block size",
    ),
    "packed keys, like us": (replace(UNREAD, knows_keys=False), peer(), Stock),
    "keys by column": (UNREAD, replace(PEER, backend="CPU_ATTN"), "KVPATCH_ACCEPT"),
    "another form of rows": (
        replace(UNREAD, backend="FLASH_ATTN"), replace(PEER, backend="TRITON_MLA"),
        "use one attention backend",
    ),
    "rows, which vLLM reorders for a CPU": (
        replace(UNREAD, backend="CPU_ATTN"), replace(PEER, backend="FLASH_ATTN"), Stock,
    ),
    "smaller blocks that are misread": (
        replace(UNREAD, misreads_smaller="misreads them"),
        replace(PEER, block_tokens=8), "use one --block-size",
    ),
    "smaller blocks that are read": (UNREAD, replace(PEER, block_tokens=8), Stock),
    "larger blocks where smaller ones are misread": (
        replace(UNREAD, misreads_smaller="misreads them"),
        replace(PEER, block_tokens=64), Stock,
    ),
    "a page that no region has": (
        replace(UNREAD, missed_layer="layers.3"), PEER, "VLLM_KV_CACHE_LAYOUT=LBHNC",
    ),
    "a mirror like ours": (replace(UNREAD, mirror_layout="NHD"), PEER, Stock),
    "a mirror of latents": (
        replace(UNREAD, mirror_layout="NHD", has_heads=False), replace(PEER, tp_size=8), Stock,
    ),
    "a mirror that states HND and has it, of other ranks": (
        replace(UNREAD, layout="HND", mirror_layout="HND"),
        replace(PEER, layout="HND", tp_size=8), Stock,
    ),
    "a mirror that states NHD and has it, of other ranks": (
        replace(UNREAD, layout="NHD", mirror_layout="NHD", total_heads=8),
        replace(PEER, layout="NHD", tp_size=4), "KVPATCH_HOST_BUFFER=always",
    ),
    "a mirror of one head on each rank": (
        replace(UNREAD, tp_size=8, mirror_layout="NHD", total_heads=4),
        replace(PEER, tp_size=4), Stock,
    ),
    "a mirror that states NHD and has it, of other blocks": (
        replace(UNREAD, layout="NHD", mirror_layout="NHD"),
        replace(PEER, layout="NHD", block_tokens=64), Stock,
    ),
    "a share of the heads in NHD": (
        replace(UNREAD, layout="NHD", mixes_tokens=True, total_heads=8),
        replace(PEER, layout="NHD", tp_size=4), "VLLM_KV_CACHE_LAYOUT=HND",
    ),
    "one head on each rank in NHD": (
        replace(UNREAD, tp_size=8, layout="NHD", mixes_tokens=True, total_heads=4),
        replace(PEER, layout="NHD", tp_size=4), Stock,
    ),
    "a mirror of one head on each rank but in windows": (
        replace(UNREAD, tp_size=8, mirror_layout="NHD", total_heads=4, heads=_MIMO),
        replace(PEER, tp_size=4), "KVPATCH_HOST_BUFFER=always",
    ),
    "a share of the windows' heads in NHD": (
        replace(UNREAD, tp_size=8, layout="NHD", mixes_tokens=True, total_heads=4, heads=_MIMO),
        replace(PEER, layout="NHD", tp_size=4), "VLLM_KV_CACHE_LAYOUT=HND",
    ),
    "heads of some layers alone are copied": (
        replace(UNREAD, tp_size=8, layout="HND", mirror_layout="HND", total_heads=4, heads=_MIMO),
        replace(PEER, layout="HND", tp_size=4), "use one --tensor-parallel-size",
    ),
    "all heads are copied on both sides": (
        replace(UNREAD, tp_size=8, layout="HND", total_heads=4, heads=_MIMO),
        replace(PEER, layout="HND", tp_size=16), Stock,
    ),
    "pages of unlike bytes in one place, of other ranks": (
        replace(UNREAD, tp_size=2, layout="BLHNC", heads=_PAGES), replace(PEER, layout="BLHNC"),
        "use one --tensor-parallel-size",
    ),
    "pages of unlike bytes each in its own place, of other ranks": (
        replace(UNREAD, tp_size=2, heads=_PAGES._replace(overlays_pages=False)), PEER, Stock,
    ),
    "other ranks, which share out tokens": (
        replace(UNREAD, shares_tokens=True), replace(PEER, tp_size=8), "--tensor-parallel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD_PEERS)
def test_what_becomes_of_a_peer_that_we_do_not_read(name: str) -> None:
    ours, theirs, expected = UNREAD_PEERS[name]

    facts = NEWEST if theirs.layout in NAMED_LAYOUTS else FACTS["0.19.1"]
    _says(decide(ours, theirs, facts), expected)


@pytest.mark.parametrize(("kinds", "block_tokens"), [((_POOLED, _INDEXER), 8), ((_POOLED,), 64)])
def test_what_joins_is_cut_by_nobody(kinds: tuple[Kind, ...], block_tokens: int) -> None:
    """Smaller blocks beside what does not join, and larger ones."""
    ours = replace(UNREAD, kinds=dict(zip("ab", kinds, strict=False)))

    found = decide(ours, replace(PEER, block_tokens=block_tokens), NEWEST)

    assert isinstance(found, PeerRefused)
    assert f"{kinds[-1].contents}, and move whole: use one block size" in str(found)


def test_what_joins_is_refused_for_all_that_a_like_one_is() -> None:
    theirs = peer(block_tokens=8, attn_backend_name="FLASHINFER")
    refused = decide(whole(_POOLED), theirs, NEWEST)
    assert isinstance(refused, PeerRefused) and "FLASHINFER" in refused.reason, refused

    ours = whole(_POOLED)
    by_column = replace(ours, geometry=replace(ours.geometry, key_order=KeyOrder.COLUMN_MAJOR))
    refused = decide(by_column, peer(block_tokens=8), NEWEST)
    assert isinstance(refused, PeerRefused), refused


def test_what_joins_is_the_releases_beside_what_we_read() -> None:
    """Smaller blocks, on a release that joins them rightly, and not through a host buffer."""
    ours, theirs = whole(_POOLED), peer(block_tokens=8)

    _says(decide(ours, theirs, NEWEST), Stock)
    for refused in (
        decide(ours, theirs, FACTS["0.31.0"]),
        decide(ours, peer(block_tokens=64), NEWEST),
        decide(whole(_INDEXER), theirs, NEWEST),
        decide(replace(ours, reads_all=True), theirs, NEWEST),
        decide(ours, peer(block_tokens=8, kv_cache_layout="LBNHC"), NEWEST),
    ):
        assert isinstance(refused, PeerRefused), refused
        assert "move whole" in refused.reason
