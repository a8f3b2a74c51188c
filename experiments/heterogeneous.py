"""Heterogeneous pairs of real engines, held against one; experiments/heterogeneous.sh runs this."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.engines.checkout import importable_in_engines
from experiments.engines.pairs import choose
from experiments.engines.shown import show_pairs
from kvpatch.cli import exit_statuses, results_folder
from kvpatch.verify.setups import Options, require_release

_PIPE_COLUMNS = 132

app = typer.Typer(add_completion=False)


@app.command()
def heterogeneous(
    rows: Annotated[
        str | None, typer.Option(help="Which rows, separated by commas; by default all.")
    ] = None,
    stock: Annotated[bool, typer.Option(help="Also serve each row without kvpatch.")] = True,
    list_rows: Annotated[bool, typer.Option("--list", help="Only name the rows.")] = False,
    release: Annotated[
        str | None, typer.Option(help="vLLM release that must be installed.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    work_dir: Annotated[
        Path | None, typer.Option(help="For logs, models and results; kept.")
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds that an engine may take to start.")
    ] = 900.0,
) -> None:
    """Serve heterogeneous pairs, stock beside kvpatch on D, against one single engine.

    Exit status: 0 every pair identical with kvpatch and every spoiled cache noticed, 1 not,
    2 could not run, 128 + n stopped by signal n.
    """
    # A pipe has no width of its own, and the table should not be cut there.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    importable_in_engines()
    with exit_statuses():
        chosen = choose(rows)
        if list_rows:
            for row in chosen:
                typer.echo(row.name)
            return
        if release is not None:
            require_release(release)
        options = Options(
            work_dir=results_folder(work_dir),
            max_tokens=max_tokens,
            startup_timeout_s=startup_timeout,
        )
        passed = show_pairs(chosen, options, console, "matrix", with_stock=stock)
    if not passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
