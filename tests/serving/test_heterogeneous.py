"""Heterogeneous pairs of real engines: kvpatch on the decode side, held against one single engine.

The rows that tell most; experiments/heterogeneous.sh has all of them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.releases import is_full

from .judged import PROMPTS, metrics_of, require_identical, require_metrics

pytestmark = [
    pytest.mark.serving,
    pytest.mark.engines,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"
    ),
]

_TIMEOUT_S = 1800


def _has_amx() -> bool:
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "amx_tile" in processor.read_text().split()


def _run(work_dir: Path, rows: str, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Row -> its records, of a run that must succeed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.heterogeneous"),
            *("--work-dir", str(work_dir), "--rows", rows, *options),
        ],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records: dict[str, list[dict[str, Any]]] = {}
    for line in (work_dir / "heterogeneous.jsonl").read_text().splitlines():
        record = json.loads(line)
        records.setdefault(record["row"], []).append(record)
    assert sorted(records) == sorted(rows.split(","))  # as they end, not as they were named
    return records


def _stock_is_wrong_or_fails(records: list[dict[str, Any]]) -> bool:
    verdicts = [r["setups"]["stock"]["verdict"] for r in records if not r["control"]]
    return any(verdict["tokens"] for verdict in verdicts)


def _require_host_buffers(folder: Path, records: list[dict[str, Any]]) -> None:
    """Both caches are out of NIXL's reach; D asks P, which has kvpatch too."""
    shown = require_metrics(folder, "host-128-32", records, "host_buffer")
    assert shown["kvpatch_load_holds_total held"] == shown["kvpatch_loads_total received"], shown
    saved = metrics_of(folder, "host-128-32-prefill-0")
    assert saved["kvpatch_host_buffer_saved_blocks_total"] > 0, saved
    assert saved["kvpatch_host_buffer_blocks all"] > 0, saved


@pytest.mark.quick
def test_the_test_commands_pairs(tmp_path: Path) -> None:
    """A like pair, larger blocks at P, and these behind host buffers."""
    rows = _run(tmp_path, "64-64,128-32,host-128-32", "--no-stock")
    for records in rows.values():
        require_identical(records, layers=4)
    require_metrics(tmp_path, "64-64", rows["64-64"], "stock")
    shown = require_metrics(tmp_path, "128-32", rows["128-32"], "direct", "staged")
    assert shown["kvpatch_load_holds_total held"] == 0, "P has no kvpatch"
    _require_host_buffers(tmp_path, rows["host-128-32"])
    stock = metrics_of(tmp_path, "128-32-prefill-0")
    assert all(name.startswith("vllm:") for name in stock), "P has no kvpatch"


@pytest.mark.skipif(
    not is_full(), reason="128-32 is below, and the lab plays stock: tests/run.sh --full"
)
def test_larger_blocks_beside_stock(tmp_path: Path) -> None:
    """Stock fails or answers wrongly."""
    ((row, records),) = _run(tmp_path, "128-32").items()
    require_identical(records, layers=4)
    require_metrics(tmp_path, row, records, "direct", "staged")
    assert _stock_is_wrong_or_fails(records)


def test_pairs_of_one_model(tmp_path: Path) -> None:
    """Larger and smaller blocks, heads split and joined, and two different P for one D."""
    rows = _run(tmp_path, "128-32,32-128,tp1-tp2,tp2-tp1,2p1d", "--no-stock")
    for records in rows.values():
        require_identical(records, layers=4)
    for row in ("128-32", "32-128"):
        require_metrics(tmp_path, row, rows[row], "direct", "staged")


def test_a_sliding_window(tmp_path: Path) -> None:
    """Several cache groups, of which some hold a window only."""
    rows = _run(tmp_path, "window-128-32", "--no-stock")
    for records in rows.values():
        require_identical(records, layers=4)
        groups = {len(r["setups"]["kvpatch"]["decode"]["block_ids"]) for r in records}
        assert groups == {2}


def test_recurrent_state(tmp_path: Path) -> None:
    """A hybrid model: attention by tokens, and the state behind all but the last of them."""
    rows = _run(tmp_path, "hybrid-128-64", "--no-stock")
    for records in rows.values():
        require_identical(records, layers=4, prompts=PROMPTS - 1)  # none of one token


@pytest.mark.skipif(not _has_amx(), reason="this processor has no AMX")
def test_tiles(tmp_path: Path) -> None:
    """bfloat16 on a processor with AMX; P's kvpatch says how its keys lie."""
    rows = _run(
        tmp_path, "tiles-128-32,tiles-32-128" if is_full() else "tiles-128-32", "--no-stock"
    )
    for records in rows.values():
        require_identical(records, layers=4)


def test_other_layouts(tmp_path: Path) -> None:
    """An NHD cache read into an HND one, with blocks of another size."""
    rows = _run(tmp_path, "nhd-hnd-128-32", "--no-stock")
    for records in rows.values():
        require_identical(records, layers=4)
