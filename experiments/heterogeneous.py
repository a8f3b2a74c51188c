"""Heterogeneous pairs of real engines, held against one; experiments/heterogeneous.sh runs this."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.engines.checkout import importable_in_engines
from experiments.engines.pairs import ROWS, TILED_ROWS, choose
from experiments.engines.recorded import DATA, record, require_all
from experiments.engines.shown import all_passed, show_pairs
from kvpatch.tools.cli import exit_statuses, results_folder, takes
from kvpatch.tools.verify.setups import Options, require_release

_PIPE_COLUMNS = 132

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Asked:
    """The options, as they were typed."""

    rows: Annotated[
        str | None, typer.Option(help="Which rows, separated by commas; by default all.")
    ] = None
    stock: Annotated[bool, typer.Option(help="Also serve each row without kvpatch.")] = True
    list_rows: Annotated[bool, typer.Option("--list", help="Only name the rows.")] = False
    release: Annotated[str | None, typer.Option(help="vLLM release that must be installed.")] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24
    work_dir: Annotated[Path | None, typer.Option(help="For logs, models and results; kept.")] = (
        None
    )
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds that an engine may take to start.")
    ] = 900.0
    write: Annotated[
        bool, typer.Option("--write", help=f"Write {DATA.name} of the documentation anew.")
    ] = False


@app.command()
@takes(Asked)
def heterogeneous(asked: Asked) -> None:
    """Serve heterogeneous pairs, stock beside kvpatch on D, against one single engine.

    Exit status: 0 every pair identical with kvpatch and every spoiled cache noticed, 1 not,
    2 could not run, 128 + n stopped by signal n.
    """
    # A pipe has no width of its own, and the table should not be cut there.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    importable_in_engines()
    with exit_statuses():
        chosen = choose(asked.rows, ROWS if asked.rows is None else (*ROWS, *TILED_ROWS))
        if asked.list_rows:
            for row in chosen:
                typer.echo(row.name)
            return
        if asked.write:
            require_all([row.name for row in chosen if asked.stock])
        if asked.release is not None:
            require_release(asked.release)
        options = Options(
            work_dir=results_folder(asked.work_dir),
            max_tokens=asked.max_tokens,
            startup_timeout_s=asked.startup_timeout,
        )
        results = show_pairs(chosen, options, console, "heterogeneous", with_stock=asked.stock)
    if asked.write:
        record(results)
    if not all_passed(results):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
