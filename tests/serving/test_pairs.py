"""The table of heterogeneous pairs: its rows, its engines, and what it says."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.engines import recorded, run
from experiments.engines.models import MAKERS
from experiments.engines.pairs import ROWS, Row, Single, by_single, choose, row_setups, single_setup
from experiments.engines.report import pairs_summary, pairs_table, prefix_hits, problems, row_line
from experiments.engines.run import RowResult, run_pairs
from kvpatch.core.errors import BadOptions, EngineFailed
from kvpatch.tools.verify.compare import Observation, Snapshot, compare
from kvpatch.tools.verify.engine import Options
from kvpatch.tools.verify.handoff import Completion
from kvpatch.tools.verify.model import Case

pytestmark = pytest.mark.serving

_CASES = (
    Case("len-10", tuple(range(10)), step=0),
    Case("prefix-35-a", tuple(range(10)), step=1),
    Case("prefix-35-b", tuple(range(10)), step=2),
    Case("control-10", tuple(range(10)), step=3, control=True),
)
_CACHE = Snapshot({"layer.0": "aa", "layer.1": "bb"}, 9, block_ids=((4, 5),))
_SPOILED = replace(_CACHE, fingerprints={"layer.0": "aa", "layer.1": "cc"})
_GOOD = Observation(Completion((1, 2), "ab", 0.04), prefill=_CACHE, decode=_CACHE)
_WRONG = replace(_GOOD, completion=Completion((1, 3), "ac", 0.01))
_NOTICED = replace(_WRONG, decode=_SPOILED)
_FAILED = Observation(None, error="http://host: HTTP 500: no")


def _result(ours: Observation, control: Observation = _NOTICED, failure: str = "") -> RowResult:
    ordinary = [case.name for case in _CASES if not case.control]
    observations = {
        "single": {case.name: replace(_GOOD, decode=None) for case in _CASES},
        "stock": dict.fromkeys(ordinary, _FAILED),
        "kvpatch": {**dict.fromkeys(ordinary, ours), "control-10": control},
    }
    return RowResult(choose("128-32")[0], compare(_CASES, observations), failure)


def _drawn(result: RowResult) -> list[str]:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=200).print(pairs_table([result]))
    (line,) = (line for line in out.getvalue().splitlines() if " 128-32 " in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_row_passes_whatever_stock_does() -> None:
    result = _result(_GOOD)
    assert result.passed
    assert _drawn(result) == [
        *("128-32", "128 -> 32", "3 of 3 fail", "identical", "identical", "1/1", "2")
    ]
    assert prefix_hits(result.comparison) == [2]
    result = replace(result, reasons={"stock": "AssertionError: local block size"})
    assert problems([result]) == [
        "128-32: stock/len-10: http://host: HTTP 500: no",
        "128-32: stock: AssertionError: local block size",
    ]
    assert row_line(result) == "128-32 (128 -> 32): stock 3 of 3 fail, kvpatch identical"
    assert "1 of 1 pairs identical with kvpatch" in pairs_summary([result])


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (_result(_WRONG), "3 of 3 wrong tokens, HTTP 200"),
        (_result(_FAILED), "3 of 3 fail"),
        (_result(replace(_GOOD, decode=_SPOILED)), "wrong 3/3"),
        (_result(_GOOD, control=_GOOD), "0/1"),
        (_result(_GOOD, control=_FAILED), "0/1"),
    ],
)
def test_anything_else_fails_the_row(result: RowResult, says: str) -> None:
    assert not result.passed
    assert says in _drawn(result)
    assert "0 of 1 pairs identical" in pairs_summary([result])


def test_a_row_without_answers_or_with_a_failure_fails() -> None:
    assert not _result(_GOOD, failure="decode ended with status 1").passed
    nothing = {"single": {}, "stock": {}, "kvpatch": {}}
    empty = RowResult(choose("128-32")[0], compare(_CASES, nothing))
    assert not empty.passed
    assert "not run" in _drawn(empty)


def test_a_single_engine_that_fails_fails_its_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for the engines: the single one of the window model does not start."""
    from rich.console import Console

    async def observe_single(single: Single, *_: Any) -> Any:
        if single.model == "window":
            raise EngineFailed("no room")
        return _CASES, {}

    async def judge(self: Any, reference: Any) -> RowResult:
        return replace(_result(_GOOD), row=self.row)

    monkeypatch.setattr(run, "require_environment", lambda: None)
    monkeypatch.setattr(run, "MAKERS", dict.fromkeys(MAKERS, lambda folder: folder))
    monkeypatch.setattr(run, "_observe_single", observe_single)
    monkeypatch.setattr(run._RowRun, "judge", judge)
    told: list[RowResult] = []
    rows = choose("128-32,window-128-32,nhd-hnd")
    console = Console(file=io.StringIO())
    work = run_pairs(rows, Options(tmp_path), console, told.append)
    results = asyncio.run(work)
    assert results == told
    assert [result.row.name for result in results] == ["128-32", "nhd-hnd", "window-128-32"]
    assert [result.passed for result in results] == [True, True, False]
    assert problems(results)[-1] == "window-128-32: no room"


def test_what_is_recorded_is_what_the_table_says() -> None:
    rows = recorded.table_rows([_result(_GOOD)])
    assert rows == [["128 → 32", "3 of 3 fail", "identical"]]
    (row,) = recorded.table_rows([replace(_result(_GOOD), row=choose("64-64")[0])])
    assert row == ["64 → 64, prefix hits", "3 of 3 fail", "identical, on stock's path"]
    (row,) = recorded.table_rows([_result(_WRONG)])
    assert row[2] == "not passed: 3 of 3 wrong tokens, HTTP 200"
    assert set(recorded.TITLES) <= {row.name for row in ROWS}
    with pytest.raises(BadOptions, match="none of .*'96-64'"):
        recorded.require_all(["128-32"])


def test_every_row_has_a_model_and_a_name_of_its_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.single.model for row in ROWS} <= set(MAKERS)
    grouped = by_single(ROWS)
    assert sum(map(len, grouped.values())) == len(ROWS)
    names = [single_setup(single, "model").specs[0].name for single in grouped]
    assert len(set(names)) == len(names), "logs would overwrite each other"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_prefill_engines_have_kvpatch_with_a_host_buffer_only(row: Row) -> None:
    stock, patched = row_setups(row, "model")
    assert stock.prefill == patched.prefill
    has_buffer = row.host_buffer_bytes is not None
    assert [spec.kvpatch for spec in patched.specs] == [has_buffer] * len(stock.prefill) + [True]
    for spec in patched.specs:
        settings = dict(spec.environment)
        assert settings.get("KVPATCH_HOST_BUFFER") == ("always" if has_buffer else None)
        wanted = str(row.host_buffer_bytes) if has_buffer else None
        assert settings.get("KVPATCH_HOST_BUFFER_BYTES") == wanted
    assert not any(spec.kvpatch for spec in stock.decode)
    assert "KVPATCH_HOST_BUFFER" not in dict(stock.decode[0].environment)
    assert all(spec.connector for spec in (*stock.specs, *patched.specs))
    assert stock.decode[0].arguments == patched.decode[0].arguments
    assert len({spec.name for spec in (*stock.specs, *patched.specs)}) == len(stock.prefill) + 2
