"""A peer with another compatibility hash: what is said of it, and what is checked of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused, SettingsError
from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.observe.book import Book
from kvpatch.peer import peer_hash
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.decision import Read, Stock, decide
from kvpatch.peer.peer_hash import ComparedHash, Explanation, NamedPeers, OwnFactors, digest_of
from kvpatch.worker.cache_kinds import unknown

from .test_decision import _INDEXER as INDEXER
from .test_decision import (
    NEWEST,
    local,
    local_with_states,
    peer,
    whole,
)

VALUES: dict[str, Any] = {
    "vllm_version": "0.33.0",
    "nixl_connector_version": 15,
    "model": "a/model",
    "dtype": "torch.bfloat16",
    "num_kv_heads": 8,
    "head_size": 128,
    "num_hidden_layers": 32,
    "attn_backend_name": "FLASH_ATTN",
    "cache_dtype": "auto",
    "cross_layers_blocks": False,
    "is_hma_enabled": True,
    "speculative_config": None,
    "transfer_mode": "pull",
}
OWN = OwnFactors(NEWEST, VALUES)
LAYERS = tuple(local().geometry.layers.values())


def hash_of(**changes: Any) -> str:
    """What a P of our release states that is as we are, but for these."""
    return digest_of({name: {**VALUES, **changes}[name] for name in NEWEST.hash_factors})


def named(
    release: str = "", backend: str = "", version: str = "", cache_dtype: str = "auto"
) -> Explanation:
    """As a peer's hash has told it."""
    return Explanation(
        version=version or release or "0.33.0",
        release=release or "0.33.0",
        backend=backend or "FLASH_ATTN",
        own_version="0.33.0",
        own_backend="FLASH_ATTN",
        cache_dtype=cache_dtype,
    )


def differing(found: Explanation, **changes: Any) -> AgentMetadata:
    changes.setdefault("attn_backend_name", found.backend)
    ranks = changes.pop("rank", 0), changes.pop("size", 1)
    return replace(peer(*ranks, **changes), named=found)


#: What is accepted of a peer, what else it states, and what becomes of it (part of a refusal).
PEERS: dict[str, tuple[Callable[[], Any], AgentMetadata, Any]] = {
    "another release": (local, differing(named("0.32.0")), Stock),
    "a build of our release": (local, differing(named("0.33.0", version="0.33.0+cpu")), Stock),
    "another backend": (local, differing(named(backend="FLASHINFER")), Stock),
    "another release and backend": (local, differing(named("0.31.0", "TRITON_ATTN")), Stock),
    "ranks of another release of one generation": (
        local, differing(named("0.32.0"), rank=1, size=2), Stock,
    ),
    "ranks of another generation": (
        local, differing(named("0.29.0"), rank=1, size=2),
        "one --tensor-parallel-size or one vLLM",
    ),
    "a release of other layouts": (
        local, differing(named("0.28.0")), "only 0.33.0 names layouts by all their dimensions",
    ),
    "a release without leases": (
        local, differing(named("0.21.0")), "only 0.33.0 keeps blocks by leases",
    ),
    "a backend with keys by column, of another release": (
        local, differing(named("0.32.0", "CPU_ATTN")), Read,
    ),
    "a backend of latents": (local, differing(named(backend="FLASHMLA")), "are latents"),
    "a backend that nobody knows": (
        local, differing(named(backend="CUSTOM")), "are not known here",
    ),
    "a backend that its handshake denies": (
        local, differing(named(backend="FLASHINFER"), attn_backend_name="FLASH_ATTN"),
        "by its hash its attention backend is FLASHINFER, and its handshake says FLASH_ATTN",
    ),
    "a cache with scales": (
        local, differing(named("0.32.0", cache_dtype="fp8")), "where scales lie",
    ),
    "recurrent state": (
        local_with_states, differing(named("0.32.0")),
        "this model has recurrent state too",
    ),
    "whole blocks": (
        lambda: whole(INDEXER), differing(named("0.32.0")),
        "hold an indexer's values and scales, and of a peer like this one only rows",
    ),
    "a cache of a kind that nobody knows": (
        lambda: whole(unknown("strange.Backend")), differing(named(backend="FLASHINFER")),
        "hold what kvpatch does not know: strange.Backend",
    ),
    "layers of several backends": (
        lambda: local(backends=frozenset({"FLASH_ATTN", "FLASHINFER"})),
        differing(named("0.32.0")),
        "attention backends FLASHINFER, FLASH_ATTN, and a hash names the first one's alone",
    ),
    "a handshake that does not say how blocks are cut": (
        lambda: local(facts=FACTS["0.20.2"], backend="FLASHINFER"),
        differing(replace(named("0.20.2", "TRITON_ATTN"))), "does not say how a backend cuts",
    ),
    "layers of a draft model, numbered otherwise": (
        lambda: local(layers=dict(zip(("model.0", "draft_model.0"), LAYERS, strict=True))),
        differing(named("0.29.0")), "in two orders",
    ),
    "layers of a draft model": (
        lambda: local(layers=dict(zip(("model.0", "draft_model.0"), LAYERS, strict=True))),
        differing(named("0.30.0")), Stock,
    ),
    "bytes of another model": (
        local, differing(named("0.32.0"), block_tokens=64, block_lens=[8192] * 2),
        "pages without padding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_what_becomes_of_a_peer_that_is_accepted(name: str) -> None:
    ours, theirs, expected = PEERS[name]
    cache = ours()
    found = decide(cache, theirs, cache.geometry.facts)
    if isinstance(expected, type):
        assert isinstance(found, expected), found
        return
    assert isinstance(found, PeerRefused), found
    assert "cannot be read" in found.reason
    assert expected in str(found)


def compared(*, checks: bool = True) -> tuple[ComparedHash, NamedPeers, Book]:
    peers, book = NamedPeers(), Book()
    return ComparedHash.of(OWN, peers, book, checks=checks), peers, book


def test_ours_is_what_it_was_to_all_who_send_it() -> None:
    ours, peers, _ = compared()
    plain = hash_of()
    assert str(ours) == f"{ours}" == plain
    assert plain == ours
    assert (plain != ours) is False
    assert {plain: 1}[ours] == 1
    assert ours != 7 and ours is not None
    assert peers.accepted is None


def test_another_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by vLLM's term: callers of its handshake, as its own tests, know no kvpatch."""
    monkeypatch.delenv(settings.ACCEPT, raising=False)
    ours, peers, book = compared()
    with pytest.raises(RuntimeError, match=r"compatibility hash mismatch[:,]"):
        assert hash_of(model="another") != ours
    with pytest.raises(PeerRefused, match=r"compatibility hash mismatch[:,]") as found:
        assert hash_of(attn_backend_name="FLASHINFER") != ours
    assert "P runs FLASHINFER; this engine runs FLASH_ATTN" in found.value.reason
    assert "KVPATCH_ACCEPT=attn_backend here" in found.value.cure
    assert peers.accepted is None
    assert "PeerRefused" in repr(book.take())  # and it is counted


@pytest.mark.parametrize(
    ("accept", "changes", "is_taken"),
    [
        ("vllm_version", {"vllm_version": "0.33.0+cpu"}, True),
        ("attn_backend", {"attn_backend_name": "FLASHINFER"}, True),
        (
            "attn_backend vllm_version",
            {"vllm_version": "0.33.0+cpu", "attn_backend_name": "FLASHINFER"},
            True,
        ),
        ("attn_backend", {"vllm_version": "0.33.0+cpu"}, False),
        ("vllm_version", {"vllm_version": "0.33.0+cpu", "attn_backend_name": "FLASHINFER"}, False),
        ("vllm_version,attn_backend", {"dtype": "torch.float16"}, False),
        ("vllm_version,attn_backend", {"cache_dtype": "fp8"}, False),
        (
            "vllm_version,attn_backend",
            {"vllm_version": "0.33.0+cpu", "dtype": "torch.float16"},
            False,
        ),
        ("vllm_version,attn_backend", {"model": "another"}, False),
        ("vllm_version,attn_backend", {"nixl_connector_version": 14}, False),
        ("vllm_version,attn_backend", {"is_hma_enabled": False}, False),
    ],
)
def test_only_what_is_listed_is_waived(
    monkeypatch: pytest.MonkeyPatch, accept: str, changes: dict[str, Any], is_taken: bool
) -> None:
    monkeypatch.setenv(settings.ACCEPT, accept)
    ours, peers, _ = compared()
    if not is_taken:
        with pytest.raises(PeerRefused):
            assert hash_of(**changes) != ours
        assert peers.accepted is None
        return
    assert (hash_of(**changes) != ours) is False
    found = peers.accepted
    assert found is not None and len(found.factors) == len(changes)
    assert set(found.factors) <= set(accept.replace(" ", ",").split(","))
    # A handshake with the next peer begins anew, in each thread for itself.
    others: list[Explanation | None] = []
    thread = threading.Thread(target=lambda: others.append(peers.accepted))
    thread.start()
    thread.join()
    assert others == [None]
    assert hash_of() == ours
    assert peers.accepted is None


# --- the search for what makes a peer's hash, which the lab plays at real handshakes -------------

HASHING = [release for release in RELEASES if FACTS[release].states_hash]


def factors_of(release: str, version: str = "", **changes: Any) -> dict[str, Any]:
    """What an engine of a release hashes."""
    facts = FACTS[release]
    about = {"vllm_version": version or release}
    about["nixl_connector_version"] = facts.connector_version
    return {name: {**VALUES, **about, **changes}[name] for name in facts.hash_factors}


def told(release: str, peer: dict[str, Any]) -> tuple[str, str, str] | None:
    """The version, the release and the backend that an engine of a release says of a peer."""
    own = OwnFactors(FACTS[release], {**VALUES, **factors_of(release)})
    found = peer_hash.explain(own, digest_of(peer))
    return None if found is None else (found.version, found.release, found.backend)


@pytest.mark.parametrize("release", HASHING)
def test_every_other_release_and_build_is_named_with_its_backend(release: str) -> None:
    for number, other in enumerate(HASHING):
        backend = peer_hash.BACKENDS[7 * number % len(peer_hash.BACKENDS)]
        peer = factors_of(other, attn_backend_name=backend)
        assert told(release, peer) == (other, other, backend)
    for label in ("+cpu", "+cu129", "+rocm700"):
        found = told(release, factors_of(release, release + label))
        assert found == (release + label, release, VALUES["attn_backend_name"])


@pytest.mark.parametrize("release", {FACTS[name].hash_factors: name for name in HASHING}.values())
def test_no_other_difference_is_named(release: str) -> None:
    """Alone, nor beside one that would be; nor what is no release, which cannot be accepted."""
    for factor in FACTS[release].hash_factors - {"vllm_version", "attn_backend_name"}:
        for backend in ("FLASH_ATTN", "FLASHINFER"):
            other = factors_of(release, attn_backend_name=backend)
            assert told(release, other | {factor: "another"}) is None, factor
    for version in ("0.33.0rc1", "0.33.0.post1", "0.99.0"):
        assert told(release, factors_of(release, version)) is None


def test_nothing_is_waived_where_nobody_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ACCEPT, "attn_backend")
    ours, peers, _ = compared(checks=False)
    with pytest.raises(PeerRefused, match="KVPATCH_DISABLE"):
        assert hash_of(attn_backend_name="FLASHINFER") != ours
    assert peers.accepted is None


def test_each_hash_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def explain(_: OwnFactors, stated: str) -> None:
        looked.append(stated)

    monkeypatch.setattr(peer_hash, "explain", explain)
    ours, _, _ = compared()
    hashes = [f"{number:064x}" for number in range(300)]
    for stated in (*hashes, *hashes[-10:], "short", "x" * 100_000):
        with pytest.raises(PeerRefused, match="no attention backend explains it"):
            assert stated != ours
    assert looked == hashes


_BYTES = ("model", "dtype", "quantization", "cache_dtype", "kv_cache_dtype", "head_size")
_NO_FACTORS = ("version", "*", "all", "vllm_version=0.32.0")


@pytest.mark.parametrize(
    ("accept", "words"),
    [
        *((f"vllm_version,{name}", "can never be accepted") for name in _BYTES),
        *((name, "not one of vllm_version, attn_backend") for name in _NO_FACTORS),
    ],
)
def test_what_cannot_be_listed(monkeypatch: pytest.MonkeyPatch, accept: str, words: str) -> None:
    monkeypatch.setenv(settings.ACCEPT, accept)
    with pytest.raises(SettingsError, match=words):
        settings.accepted_factors()
