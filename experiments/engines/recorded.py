"""Records a run of all pairs, as the data that README's table is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.engines.report import tokens_cell
from experiments.engines.run import RowResult
from experiments.harness import ROOT
from kvpatch.core.errors import BadOptions
from kvpatch.core.installed import installed_vllm
from tests.played import write_table

DATA = ROOT / "docs" / "data" / "engines.json"

TITLES: Mapping[str, str] = {
    "128-32": "128 → 32",
    "32-128": "32 → 128",
    "96-64": "96 → 64",
    "64-64": "64 → 64, prefix hits",
    "tp1-tp2": "128 → 32, D on two ranks",
    "tp2-tp1": "32 → 128, P on two ranks",
    "nhd-hnd-128-32": "128 in NHD → 32 in HND",
    "window-128-32": "128 → 32, sliding window",
    "window-32-128": "32 → 128, sliding window",
    "2p1d": "128 and 32 → 64, two P for one D",
    "hybrid-128-64": "128 → 64, hybrid (Mamba2 and attention)",
    "hybrid-64-128": "64 → 128, hybrid",
    "hybrid-64-64": "64 → 64, hybrid",
}
"""The pairs of the table, in its order, and what a reader sees of each."""

HYBRID_RANKS: Mapping[str, str] = {
    "hybrid-64-tp1-tp2": "64 → 64, D on two ranks",
    "hybrid-tp1-tp2": "128 → 64, D on two ranks",
    "hybrid-tp2-tp1": "64 → 128, P on two ranks",
}
"""The same of ``docs/data/hybrid_ranks.json``, which is copied there by hand."""


def require_all(names: Sequence[str]) -> None:
    """Raise :class:`BadOptions` unless every pair of the table is among these."""
    missing = [name for name in TITLES if name not in names]
    if missing:
        raise BadOptions(
            f"--write: expected all pairs of the table, found none of {missing}",
            "leave out --rows, or --write",
        )


def record(results: Sequence[RowResult]) -> None:
    """Writes the table, with the release, the day and the commit."""
    write_table(
        DATA,
        "experiments/heterogeneous.sh --write",
        installed_vllm().version,
        "",
        ("blocks at P → D", "stock vLLM", "kvpatch on D"),
        table_rows(results),
    )


def table_rows(results: Sequence[RowResult]) -> list[list[str]]:
    """Returns the row of each pair that the table has, in its order."""
    by_name = {result.row.name: result for result in results}
    return [[title, *_cells(by_name[name])] for name, title in TITLES.items() if name in by_name]


def _cells(result: RowResult) -> tuple[str, str]:
    stock, ours = (
        tokens_cell(list(result.comparison.verdicts.get(setup, {}).values()))
        for setup in ("stock", "kvpatch")
    )
    is_like = all(side == result.row.decode for side in result.row.prefill)
    if not result.passed:
        return stock, f"not passed: {ours}"
    return stock, f"{ours}, on stock's path" if is_like else ours
