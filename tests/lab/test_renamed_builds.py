"""Builds that are no listed releases serve where their code is one's: releases by other names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpatch.core.recognise import Source
from kvpatch.patches import SLUGS
from tests.releases.cache import tree
from tests.releases.fetch import fetch
from tests.releases.renamed import renamed

from .host import Lab
from .releases import newest
from .test_like_pairs import like_pairs
from .unlike import Dimensions, cases

pytestmark = pytest.mark.lab

_STATS = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py"
_AS_NEWEST = f"0.33.1 (as {newest()}, by its code)"
_LIKE = next(case for case in like_pairs("HND") if case.name == "HND four at once")


@contextmanager
def _lab(folder: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]) -> Iterator[Lab]:
    renamed(newest(), "0.33.1", folder / newest(), changed)
    monkeypatch.setenv("KVPATCH_TEST_CACHE", str(folder))
    with Lab(newest()) as opened:
        yield opened


def _logs(lab: Lab) -> str:
    return "".join(engine._log.read_text() for engine in lab._idle)


def test_it_moves_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch([newest()])
    unlike = next(c for c in cases(Dimensions(), 20) if c.prefill.block_tokens == 32)
    with _lab(tmp_path, monkeypatch, {}) as lab:
        stock = lab.run(unlike)
        found = [lab.run(case.patched()) for case in (_LIKE, unlike)]
        logs = _logs(lab)

    assert stock.outcome != "identical", stock
    assert [report.outcome for report in found] == ["identical"] * 2, found
    assert all(report.moved_tokens for report in found)
    assert _AS_NEWEST in logs


def test_a_patch_whose_code_has_moved_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch([newest()])
    text = Source(tree(newest())).text(_STATS.removesuffix(".py").replace("/", "."))
    changed = text.replace(
        "def is_empty(self) -> bool:\n", "def is_empty(self) -> bool:\n        _ = 1\n"
    )
    assert changed != text
    with _lab(tmp_path, monkeypatch, {_STATS: changed}) as lab:
        refused = lab.run(_LIKE.patched())
        served = lab.run(_LIKE.patched(*(slug for slug in SLUGS if slug != "metrics")))

    assert "PatchRefused" in refused.detail and "KVPATCH_DISABLE=metrics" in refused.detail
    assert f"{_STATS}: expected NixlKVConnectorStats.is_empty as in" in refused.detail
    served.must_be("identical")
