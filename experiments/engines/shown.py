"""A run of pairs as people see it: a line per row, a table, and a file of all fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.engines.report import (
    pairs_json_lines,
    pairs_summary,
    pairs_table,
    problems,
    row_line,
)
from experiments.engines.run import RowResult, run_pairs
from kvpatch.tools.verify.report import write_json_lines
from kvpatch.tools.verify.run import until_signal

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.engines.pairs import Row
    from kvpatch.tools.verify.setups import Options


def show_pairs(
    rows: Sequence[Row], options: Options, console: Console, name: str, *, with_stock: bool
) -> list[RowResult]:
    """Runs the rows, and shows what came of them.

    Args:
        name: of the file of results in the options' folder, which is written after each row.

    Raises:
        Interrupted: by a signal; every engine has been stopped.
    """
    results = options.work_dir / f"{name}.jsonl"
    finished: list[RowResult] = []

    def report(result: RowResult) -> None:
        finished.append(result)
        write_json_lines(results, pairs_json_lines(finished))
        console.print(row_line(result), markup=False, soft_wrap=True, highlight=False)

    until_signal(run_pairs(rows, options, console, report, with_stock=with_stock))
    console.rule()
    console.print(pairs_table(finished))
    for line in (*problems(finished), pairs_summary(finished)):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    console.print(f"one JSON line per pair and prompt: {results}", soft_wrap=True, highlight=False)
    return finished


def all_passed(results: Sequence[RowResult]) -> bool:
    """True if every pair was identical and every spoiled cache noticed."""
    return bool(results) and all(result.passed for result in results)
