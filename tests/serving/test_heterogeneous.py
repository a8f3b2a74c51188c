"""Pairs of real engines, held against one single engine: tokens, and bytes of caches.

Of heterogeneous pairs the rows that tell most, with kvpatch on the decode side;
experiments/heterogeneous.sh has all of them. Then what else must serve as one engine does.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.releases import is_full

from .commands import ENGINES, ROOT, succeed
from .judged import PROMPTS, metrics_of, require_identical, require_metrics

pytestmark = ENGINES


def _has_amx() -> bool:
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "amx_tile" in processor.read_text().split()


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _run(work_dir: Path, rows: str, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Row -> its records, of a run in which kvpatch is identical to a single engine."""
    command = "-m", "experiments.heterogeneous", "--work-dir", str(work_dir), "--rows", rows
    succeed(*command, *options, seconds=1800)
    records: dict[str, list[dict[str, Any]]] = {}
    for record in _records(work_dir / "heterogeneous.jsonl"):
        records.setdefault(record["row"], []).append(record)
    assert sorted(records) == sorted(rows.split(","))  # as they end, not as they were named
    for row, found in records.items():
        require_identical(found, PROMPTS - row.startswith("hybrid"))  # none of one token
    return records


@pytest.mark.quick
def test_the_test_commands_pairs(tmp_path: Path) -> None:
    """A like pair, larger blocks at P, and these behind host buffers."""
    rows = _run(tmp_path, "64-64,128-32,host-128-32", "--no-stock")
    require_metrics(tmp_path, "64-64", rows["64-64"], "stock")
    shown = require_metrics(tmp_path, "128-32", rows["128-32"], "direct", "staged")
    assert shown["kvpatch_load_holds_total held"] == 0, "P has no kvpatch"
    stock = metrics_of(tmp_path, "128-32-prefill-0")
    assert all(name.startswith("vllm:") for name in stock), "P has no kvpatch"
    # Both caches are out of NIXL's reach; D asks P, which has kvpatch too.
    shown = require_metrics(tmp_path, "host-128-32", rows["host-128-32"], "host_buffer")
    assert shown["kvpatch_load_holds_total held"] == shown["kvpatch_loads_total received"], shown
    saved = metrics_of(tmp_path, "host-128-32-prefill-0")
    assert saved["kvpatch_host_buffer_saved_blocks_total"] > 0, saved
    assert saved["kvpatch_host_buffer_blocks all"] > 0, saved


@pytest.mark.skipif(
    not is_full(), reason="128-32 is above, and the lab plays stock: tests/run.sh --full"
)
def test_larger_blocks_beside_stock(tmp_path: Path) -> None:
    """Stock fails or answers wrongly."""
    ((row, records),) = _run(tmp_path, "128-32").items()
    require_metrics(tmp_path, row, records, "direct", "staged")
    verdicts = [r["setups"]["stock"]["verdict"] for r in records if not r["control"]]
    assert any(verdict["tokens"] for verdict in verdicts)


def test_pairs_of_one_model(tmp_path: Path) -> None:
    """Smaller blocks, heads split and joined, and two different P for one D."""
    rows = _run(tmp_path, "32-128,tp1-tp2,tp2-tp1,2p1d", "--no-stock")
    require_metrics(tmp_path, "32-128", rows["32-128"], "direct", "staged")


def test_a_sliding_window(tmp_path: Path) -> None:
    """Several cache groups, of which some hold a window only."""
    rows = _run(tmp_path, "window-128-32", "--no-stock")
    decode = [record["setups"]["kvpatch"]["decode"] for record in rows["window-128-32"]]
    assert {len(found["block_ids"]) for found in decode} == {2}


@pytest.mark.parametrize(
    "rows",
    [
        # Attention by tokens, and the state behind all but the last of them.
        pytest.param("hybrid-128-64", id="recurrent state"),
        # An NHD cache read into an HND one, with blocks of another size.
        pytest.param("nhd-hnd-128-32", id="other layouts"),
        # bfloat16 on a processor with AMX; P's kvpatch says how its keys lie.
        pytest.param(
            "tiles-128-32,tiles-32-128" if is_full() else "tiles-128-32",
            marks=pytest.mark.skipif(not _has_amx(), reason="this processor has no AMX"),
            id="tiles",
        ),
    ],
)
def test_other_caches(rows: str, tmp_path: Path) -> None:
    _run(tmp_path, rows, "--no-stock")


# -- kvpatch verify -------------------------------------------------------------------------


def _verify(work_dir: Path, *arguments: str) -> str:
    """What ``kvpatch verify`` says of pairs that must be identical."""
    said = succeed("-m", "kvpatch.tools.cli", "verify", "--work-dir", str(work_dir), *arguments)
    assert "all 23 identical to single" in said
    assert "negative control: differs (as it must), 3 of 3" in said
    return said


def test_a_pair_answers_like_a_single_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process is started as a user's: none is a fork (``engine_ancestor.py``)."""
    monkeypatch.delenv("TEST_ENGINE_ANCESTOR", raising=False)
    _verify(tmp_path, "--setups", "single,kvpatch")

    records = _records(tmp_path / "equivalence.jsonl")
    require_identical(records)
    fingerprints = [
        json.dumps(record["setups"]["single"]["prefill"]["fingerprints"]) for record in records
    ]
    assert len(set(fingerprints)) == len(records), "other prompts must have other fingerprints"


def test_a_strange_platform_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that vLLM's connector has never heard of: nothing else asks for a host buffer.

    The platform, with its entry point, is where every vLLM process looks. That stock refuses such a
    device the lab shows (test_host_buffer.py).
    """
    package = str(Path(__file__).parent / "out_of_tree")
    paths = [package, os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("KVPATCH_HOST_BUFFER_BYTES", str(32 * 1024**2))

    _verify(tmp_path, "--setups", "single,kvpatch", "--p-args", "--block-size 64")

    for side in ("prefill", "decode"):
        log = (tmp_path / f"kvpatch-{side}.log").read_text()
        assert "kv_buffer_device: strange" in log
        assert "host buffer of 33554432 bytes" in log


# -- kvcached -------------------------------------------------------------------------------

_PAGES = re.compile(r"stand-in: (\d+) pages are there, (\d+) came and (\d+) went")


def test_kvcacheds_layouts_grow_and_shrink_while_they_serve(tmp_path: Path) -> None:
    """kvcached's own view code in vLLM's engines, without a GPU (``elastic/kvcached_on_cpu.py``).

    Its compiled part and its manager are stood in for. A page that is not there can be neither read
    nor written: an engine that touches one ends, and its row fails.
    """
    row = "split-half-contiguous-32-128"
    script = str(ROOT / "experiments" / "kvcached_equivalence.sh")
    succeed(
        *(script, "--on-cpu", "--rows", row, "--work-dir", str(tmp_path)),
        variables={**os.environ, "KVPATCH_PYTHON": sys.executable},
    )

    require_identical(_records(tmp_path / "kvcached.jsonl"))
    for engine in ("prefill-0", "decode-kvpatch"):
        found = _PAGES.findall((tmp_path / f"{row}-{engine}.log").read_text())
        there = [int(pages) for pages, _, _ in found]
        _, came, went = map(int, found[-1])
        assert max(there) < came and min(there) < max(there), engine
        assert went > 0, engine
