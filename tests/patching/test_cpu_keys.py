"""A CPU's keys by column or in tiles; tests/lab/test_tiled_keys.py loads them from each peer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.peer.decision import Read, decide
from kvpatch.peer.statement import BY_WORD, DeclaredGeometry, declared_geometry
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.vllm_bugs import may_use_amx

from .release_workers import worker_of
from .test_accepted_peers import named
from .test_decision import NEWEST, of_two_bytes, peer_of_two_bytes

ROWS, COLUMNS, TILES = KeyOrder.ROW_MAJOR, KeyOrder.COLUMN_MAJOR, KeyOrder.TILED


@pytest.mark.parametrize("own", [ROWS, COLUMNS])
@pytest.mark.parametrize("declared", [None, TILES])
def test_blocks_too_small_for_tiles_are_by_column(own: KeyOrder, declared: KeyOrder | None) -> None:
    """Whatever the processor of P has."""
    theirs = peer_of_two_bytes(16)
    if own is ROWS:
        theirs = replace(theirs, backend="CPU_ATTN", named=named(backend="CPU_ATTN"))

    found = decide(of_two_bytes(own, declared=DeclaredGeometry(keys=declared)), theirs, NEWEST)

    assert isinstance(found, Read), found
    assert all(plane.tile is None for plane in found.mapping.planes)


@pytest.mark.parametrize("word", ["tiles", "Columns"])
def test_the_setting(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    assert declared_geometry().keys is None
    monkeypatch.setenv("KVPATCH_PEER_KEYS", word)

    assert declared_geometry().keys is BY_WORD[word.lower()]


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
