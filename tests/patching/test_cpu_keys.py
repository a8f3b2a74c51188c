"""A CPU's keys by column or in tiles: who says which, and what becomes of a peer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpatch.core.errors import PeerRefused, SettingsError
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.plane import Content
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.decision import Read, Stock, decide
from kvpatch.peer.statement import BY_WORD, DeclaredGeometry, declared_geometry
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.vllm_bugs import may_use_amx

from .release_workers import worker_of
from .test_accepted_peers import named
from .test_decision import NEWEST, of_two_bytes, peer_of_two_bytes

pytestmark = pytest.mark.patching

ROWS, COLUMNS, TILES = KeyOrder.ROW_MAJOR, KeyOrder.COLUMN_MAJOR, KeyOrder.TILED
WORDS = {COLUMNS: "columns", TILES: "tiles"}


def decided(
    own: KeyOrder,
    theirs: AgentMetadata,
    stated: KeyOrder | None = None,
    declared: KeyOrder | None = None,
    **changes: Any,
) -> Any:
    cache = of_two_bytes(own, declared=DeclaredGeometry(keys=declared), **changes)
    if own is ROWS:
        theirs = replace(theirs, backend="CPU_ATTN", named=named(backend="CPU_ATTN"))
    return decide(cache, replace(theirs, stated_keys=stated), NEWEST)


def keys_of(found: Any) -> Any:
    """The first layer's keys, as they are read."""
    assert isinstance(found, Read), found
    return next(p for p in found.mapping.planes if p.content is Content.KEY)


@pytest.mark.parametrize("own", [ROWS, COLUMNS, TILES])
@pytest.mark.parametrize("theirs", [COLUMNS, TILES])
@pytest.mark.parametrize("by", ["stated", "declared", "both"])
def test_a_peer_is_read_as_what_is_known_of_it(own: KeyOrder, theirs: KeyOrder, by: str) -> None:
    found = decided(
        own,
        peer_of_two_bytes(),
        stated=None if by == "declared" else theirs,
        declared=None if by == "stated" else theirs,
    )

    assert (keys_of(found).tile is not None) == (theirs is TILES)


@pytest.mark.parametrize("own", [ROWS, COLUMNS, TILES])
def test_nobody_knows(own: KeyOrder) -> None:
    found = decided(own, peer_of_two_bytes())

    assert isinstance(found, PeerRefused)
    for word in ("KVPATCH_PEER_KEYS", "tiles", "columns", "ENABLE_KVPATCH on P", "float32"):
        assert word in str(found)


@pytest.mark.parametrize("own", [COLUMNS, TILES])
def test_like_blocks_are_left_to_the_release(own: KeyOrder) -> None:
    """As long as nobody says that they are not alike."""
    assert isinstance(decided(own, peer_of_two_bytes(32)), Stock)
    assert isinstance(decided(own, peer_of_two_bytes(32), stated=own), Stock)


@pytest.mark.parametrize(("own", "theirs"), [(COLUMNS, TILES), (TILES, COLUMNS)])
def test_like_blocks_of_unlike_processors_are_read(own: KeyOrder, theirs: KeyOrder) -> None:
    """Stock takes the ones for the others, without an error."""
    assert (keys_of(decided(own, peer_of_two_bytes(32), declared=theirs)).tile is None) == (
        theirs is COLUMNS
    )


@pytest.mark.parametrize("own", [ROWS, COLUMNS])
@pytest.mark.parametrize("declared", [None, TILES])
def test_blocks_too_small_for_tiles_are_by_column(own: KeyOrder, declared: KeyOrder | None) -> None:
    """Whatever the processor of P has."""
    assert keys_of(decided(own, peer_of_two_bytes(16), declared=declared)).tile is None


@pytest.mark.parametrize("word", ["tiles", "Columns"])
def test_the_setting(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    assert declared_geometry().keys is None
    monkeypatch.setenv("KVPATCH_PEER_KEYS", word)

    assert declared_geometry().keys is BY_WORD[word.lower()]


def test_a_setting_of_another_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPATCH_PEER_KEYS", "rows")

    with pytest.raises(SettingsError, match="is not one of columns, tiles"):
        declared_geometry()


@pytest.mark.parametrize(
    ("backends", "kernels", "is_on"),
    [
        (["CPU_ATTN"], "amx", True),  # of fp8 too, which no rule knows the order of
        (["FLASH_ATTN", "CPU_ATTN"], "amx", True),
        (["CPU_ATTN"], "vec", False),
        (["FLASH_ATTN"], "amx", False),
    ],
)
def test_amx_is_asked_for_where_attention_uses_it(
    backends: list[str], kernels: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the cache is laid out: fp8's is none that kvpatch reads."""
    monkeypatch.setattr(ReleaseWorker, "_names_of_backends", lambda self: backends)
    monkeypatch.setattr(ReleaseWorker, "_cpus_shapes", lambda self: {(32, 64)})
    monkeypatch.setattr(ReleaseWorker, "_cpus_kernels", lambda self, tokens: kernels)
    assert worker_of("0.33.0").computes_on_amx() is is_on
    assert not worker_of("0.10.0").computes_on_amx(), "its backends have names of their own"


def test_a_pytorch_that_asks_otherwise_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.delattr(torch.cpu, "_init_amx")
    assert not may_use_amx()
