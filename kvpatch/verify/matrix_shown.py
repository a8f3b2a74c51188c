"""A run of pairs as people see it: a line per row, a table, and a file of all fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpatch.verify.matrix_report import (
    matrix_json_lines,
    matrix_summary,
    matrix_table,
    problems,
    row_line,
)
from kvpatch.verify.matrix_run import RowResult, run_matrix
from kvpatch.verify.report import write_json_lines
from kvpatch.verify.run import until_signal

if TYPE_CHECKING:
    from rich.console import Console

    from kvpatch.verify.matrix import Row
    from kvpatch.verify.setups import Options


def show_matrix(
    rows: Sequence[Row], options: Options, console: Console, name: str, *, with_stock: bool
) -> bool:
    """Runs the rows; whether every pair was identical and every spoiled cache noticed.

    Args:
        name: of the file of results in the options' folder, which is written after each row.

    Raises:
        Interrupted: by a signal; every engine has been stopped.
    """
    results = options.work_dir / f"{name}.jsonl"
    finished: list[RowResult] = []

    def report(result: RowResult) -> None:
        finished.append(result)
        write_json_lines(results, matrix_json_lines(finished))
        console.print(row_line(result), markup=False, soft_wrap=True, highlight=False)

    console.print(f"logs and results: {options.work_dir}", soft_wrap=True, highlight=False)
    until_signal(run_matrix(rows, options, console, report, with_stock=with_stock))
    console.rule()
    console.print(matrix_table(finished))
    for line in (*problems(finished), matrix_summary(finished)):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    console.print(f"one JSON line per pair and prompt: {results}", soft_wrap=True, highlight=False)
    return bool(finished) and all(result.passed for result in finished)
