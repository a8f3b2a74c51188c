"""Which kind of cache a layer has, and what becomes of kinds that the table lacks."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import FACTS
from kvpatch.geometry.state_shares import Part, SharedState
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.decision import Decision, LocalCache, Stock, decide
from kvpatch.peer.remote_geometry import peer_regions
from kvpatch.peer.unread_caches import UnreadCache
from kvpatch.worker.cache_kinds import (
    BACKENDS,
    DERIVED,
    LATENT,
    OF_SEVERAL,
    ROWS,
    SCALES_APART,
    Holds,
    Kind,
)
from kvpatch.worker.recurrent_state import StateDivision, StatePages
from kvpatch.worker.registered_caches import has_slots, kind_of, kind_of_backend
from kvpatch.worker.release_worker import ReleaseWorker

from .release_workers import worker_of
from .test_decision import whole
from .test_remote_geometry import _stated, ours_of, stating


def backend(name: str, *bases: type, module: str = "vllm.v1.attention.backends.x") -> type:
    return type(name, bases, {"__module__": module})


FLASH = backend("FlashAttentionBackend")
INDEXER = backend("DeepseekV32IndexerBackend")
STRANGE = backend("StrangeBackend", module="strange.attention")


def worker(
    kind: type, spec: object = None, dtype: str = "auto", release: str = "0.33.0", **of_cache: Any
) -> ReleaseWorker:
    layer = SimpleNamespace(get_attn_backend=lambda: kind)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
        cache_config=SimpleNamespace(cache_dtype=dtype, **of_cache),
    )
    return worker_of(
        release,
        vllm_config=config,
        _layer_specs={} if spec is None else {"a": spec},
        device_kv_caches={"a": None},
        block_size=16,
        world_size=1,
        kv_cache_layout="LBHNC",
    )


_DERIVED = next(iter(DERIVED))


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        *((p, ROWS) for p in ("ChunkedLocalAttention_64_16_", "FastPrefill")),
        ("CrossAttention_StaticSink_", ROWS),
        (_DERIVED, DERIVED[_DERIVED]),  # which may hold something else
    ],
)
def test_what_vllm_derives_holds_the_same(prefix: str, kind: Kind) -> None:
    assert kind_of_backend(backend(f"{prefix}FlashAttentionBackend", FLASH)) == kind


def test_pooled_tokens_join_where_the_backends_blocks_are_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ((prefix, kind),) = DERIVED.items()

    def pooled(name: str) -> type:
        return backend(f"{prefix}{name}", backend(name))

    flash = pooled("FlashAttentionBackend")
    assert kind_of(worker(flash), "a") == kind and kind.joins
    assert not kind_of(worker(flash, dtype="nvfp4"), "a").joins
    assert not kind_of(worker(flash), "a", has_slots=True).joins
    assert not kind_of_backend(pooled("RocmAttentionBackend")).joins
    assert kind_of_backend(pooled("AiterFlashAttentionBackend")).joins
    monkeypatch.setattr("kvpatch.worker.registered_caches._is_set", lambda variable: True)
    assert not kind_of_backend(pooled("AiterFlashAttentionBackend")).joins


@pytest.mark.parametrize(
    "found",
    [
        STRANGE,
        backend("FlashAttentionBackend", module="strange.attention"),  # another's, of that name
        backend("NewFlashAttentionBackend", FLASH),  # a subclass may hold anything
    ],
)
def test_what_is_not_in_the_table_is_unknown(found: type) -> None:
    kind = kind_of_backend(found)

    assert not kind.is_known and kind.holds is Holds.WHOLE
    assert found.__name__ in kind.contents


def _composite(general: type, causal: type) -> type:
    made = backend("MadeOfTwoBackend")
    made.general_backend_cls, made.causal_backend_cls = general, causal  # type: ignore[attr-defined]
    return made


def test_what_vllm_makes_of_two_backends_holds_what_both_do() -> None:
    triton = backend("TritonAttentionBackend")

    assert kind_of_backend(_composite(triton, FLASH)) == ROWS
    assert kind_of_backend(_composite(FLASH, INDEXER)) == OF_SEVERAL
    assert (
        kind_of_backend(_composite(INDEXER, INDEXER)).contents
        == BACKENDS[INDEXER.__name__].contents
    )
    for made in (_composite(FLASH, STRANGE), _composite(STRANGE, FLASH)):
        assert not kind_of_backend(made).is_known


def test_an_unknown_spec_is_unknown_whatever_the_backend() -> None:
    spec = type("StrangeSpec", (), {"__module__": "strange.specs"})()

    assert not kind_of(worker(FLASH, spec), "a").is_known


_SCALED = "fp8_per_token_head"


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (worker(FLASH, dtype="fp8"), ROWS),
        (worker(backend("TritonMLABackend")), LATENT),
        # 0.20 to 0.25.1 place scales as if tokens came before heads; then each row has its own.
        (worker(FLASH, dtype=_SCALED, release="0.25.1"), SCALES_APART),
        (worker(FLASH, dtype=_SCALED, release="0.26.0"), ROWS),
    ],
)
def test_dtypes_have_scales_with_their_rows_or_apart(found: ReleaseWorker, kind: Kind) -> None:
    assert kind_of(found, "a") == kind
    assert kind_of(worker(FLASH, dtype="nvfp4"), "a").holds is Holds.WHOLE


def test_heads_of_a_rank_that_works_out_its_scales_are_no_other_ranks() -> None:
    found = kind_of(worker(FLASH, dtype="fp8", release="0.27.1", calculate_kv_scales=True), "a")
    assert found.holds is Holds.ROWS and found.mixes_heads
    for dtype, kind in (("auto", FLASH), ("fp8", backend("TritonMLABackend"))):
        same = kind_of(worker(kind, dtype=dtype, release="0.27.1", calculate_kv_scales=True), "a")
        assert not same.mixes_heads


def test_an_unknown_kind_is_left_to_the_release_between_like_engines() -> None:
    """And named to all others, of which test_decision.py has each."""
    unknown = whole(kind_of_backend(STRANGE)).geometry

    assert peer_regions(unknown, _stated(block_tokens=16))  # as behind a host buffer
    with pytest.raises(PeerRefused, match=r"strange\.attention\.StrangeBackend"):
        peer_regions(unknown, _stated(block_tokens=64))


def _spec(name: str, **stated: object) -> object:
    return type(name, (), {"__module__": "vllm.v1.kv_cache_interface", **stated})()


ROCM = backend("RocmAttentionBackend")
SLOTS = _spec("FullAttentionSpec", num_head_slots=2)
RING = _spec("CircularBufferSpec")


def _decided(found: ReleaseWorker, ranks: tuple[int, int], **of_cache: bool) -> Decision:
    """Of a P, and of a D whose cache the release alone reads, with so many ranks."""
    kinds = {"a": kind_of(found, "a", has_slots=has_slots(found, "a"))}
    local = UnreadCache(16, ranks[1], "LBHNC", "", kinds=kinds, **of_cache)
    return decide(local, stating(ranks[0]), FACTS["0.33.0"])


@pytest.mark.parametrize("knows_keys", [True, False])
@pytest.mark.parametrize(
    ("found", "ranks", "is_refused"),
    [
        (worker(ROCM), (2, 1), False),  # <= 0.28 each head's tiles are apart
        (worker(ROCM, SLOTS), (2, 1), True),
        (worker(FLASH, SLOTS, "nvfp4"), (2, 1), True),
        (worker(FLASH, dtype="nvfp4"), (1, 2), True),
        (worker(FLASH, RING), (1, 2), True),
        (worker(FLASH, RING), (2, 1), False),  # each of P's ranks has all of it
    ],
)
def test_what_the_release_alone_reads_is_not_shared_out(
    found: ReleaseWorker, ranks: tuple[int, int], is_refused: bool, knows_keys: bool
) -> None:
    assert _decided(found, (1, 1), knows_keys=knows_keys) == Stock()
    decided = _decided(found, ranks, knows_keys=knows_keys)

    assert isinstance(decided, PeerRefused if is_refused else Stock)
    if isinstance(decided, PeerRefused):
        assert decided.cure == "use one --tensor-parallel-size on both sides"


@pytest.mark.parametrize(
    ("ranks", "stated", "is_refused"),
    [
        (1, (96, 320), False),
        (1, (96, 160), True),
        (1, (), False),  # <= 0.17, or another release's statement
        (2, (48, 160), False),
        (2, (48, 80), True),
        (16, (6, 20), False),  # of 8 heads: what that would be nobody knows
    ],
)
def test_states_of_other_types_are_not_left_to_the_release(
    ranks: int, stated: tuple[int, ...], is_refused: bool
) -> None:
    """No hash tells them, and it would read as many bytes as ours have."""
    division = StateDivision((SharedState(12, (Part(8),)), SharedState(40, (Part(8),))), reason="")
    local = UnreadCache(16, 1, "BLHNC", "", divisions={"a": division}, state_bytes=(96, 320))
    peer = stating(ranks, 16, "BLHNC", state_bytes=stated)

    decided = decide(local, peer, FACTS["0.33.0"])

    assert isinstance(decided, PeerRefused if is_refused else Stock)
    if isinstance(decided, PeerRefused):
        assert f"its recurrent states take {stated} bytes" in decided.reason


def test_states_of_unlike_ranks_are_left_with_no_slots_of_all_heads() -> None:
    """The release splits states that ranks share out; it would split slots too."""
    ours = ours_of()
    kind = kind_of(worker(ROCM, SLOTS), "a", has_slots=True)
    layers = {name: replace(cache, kind=kind) for name, cache in ours.layers.items()}
    division = StateDivision((SharedState(8, (Part(8),)),), reason="")
    states = {"b": StatePages(0, 64, 4, (64,), division)}
    local = LocalCache(replace(ours, layers=layers, states=states), ())
    peer = _stated(0, 2, block_tokens=ours.block_tokens)

    decided = decide(local, peer, FACTS["0.33.0"])

    assert (
        isinstance(decided, PeerRefused)
        and "a share of their heads" in decided.reason + decided.cure
    )
    rows = LocalCache(replace(ours, states=states), ())
    assert decide(rows, peer, FACTS["0.33.0"]) == Stock()


def test_what_the_release_alone_reads_is_not_cut_either() -> None:
    like, unlike = stating(), stating(1, 64)
    like_of_two = replace(like, tp_size=2)

    def decided(kind: type, peer: AgentMetadata) -> Decision:
        kinds = {"a": kind_of(worker(kind), "a")}
        local = UnreadCache(16, 1, "LBHNC", "", kinds=kinds)
        return decide(local, peer, FACTS["0.33.0"])

    assert decided(STRANGE, like) == Stock()
    assert decided(FLASH, unlike) == Stock()
    assert decided(INDEXER, like_of_two) == Stock()  # each rank has all of it
    for found, peer in ((STRANGE, unlike), (STRANGE, like_of_two), (INDEXER, unlike)):
        refused = decided(found, peer)
        assert isinstance(refused, PeerRefused)
        assert re.search("StrangeBackend|an indexer", refused.reason)
