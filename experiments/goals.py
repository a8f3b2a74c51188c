"""Compares a benchmark's results with its goals, and adds the options that all have."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Goal:
    """One number of a run; ``is_least`` where it has to be at least what is wanted."""

    name: str
    found: float
    wanted: float
    is_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.found >= self.wanted if self.is_least else self.found <= self.wanted


def are_met(goals: Sequence[Goal], console: Console) -> bool:
    """Prints goal beside result; whether all are met."""
    table = Table("goal", "wanted", "found", "")
    for goal in goals:
        sign = ">=" if goal.is_least else "<="
        word = "met" if goal.is_met else "missed"
        table.add_row(goal.name, f"{sign} {goal.wanted:g}", f"{goal.found:.2f}", word)
    console.print(table)
    return all(goal.is_met for goal in goals)


def add_options(parser: argparse.ArgumentParser) -> None:
    """--json and --check, as :func:`conclude` takes them."""
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")


def console_of(width: int) -> Console:
    """Makes a console as wide as the terminal, or as a table needs it in a file."""
    return Console(width=None if sys.stdout.isatty() else width)


def conclude(
    rows: Sequence[Any], goals: Sequence[Goal], options: argparse.Namespace, console: Console
) -> None:
    """Writes the rows, dataclasses, and judges them, each where it is asked to.

    Raises:
        SystemExit: a goal is missed.
    """
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    if options.check and not are_met(goals, console):
        sys.exit(1)
