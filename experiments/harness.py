"""The harness of all benchmarks and drills: arguments, folders, tables, goals and JSON.

A GPU machine may lack rich, and so may a Python that only shows a plan: tables alone import it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpatch.core.errors import BadOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
_DATA = ROOT / "docs" / "data"
# A script that is run as a file finds its own folder alone, and this module in it.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


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


class Published(NamedTuple):
    """A table that a page shows: the name of its data, what makes it, vLLM's release or none."""

    name: str
    made_by: str
    release: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def drawn(self) -> Table:
        return table_of("", self.columns, self.rows)


def are_met(goals: Sequence[Goal], console: Console) -> bool:
    """Prints goals beside results; true if all are met."""
    console.print(table_of("", ("goal", "wanted", "found", ""), (
        (goal.name, f"{'>=' if goal.is_least else '<='} {goal.wanted:g}", f"{goal.found:.2f}",
         "met" if goal.is_met else "missed")
        for goal in goals
    )))  # fmt: skip
    return all(goal.is_met for goal in goals)


def options_of(
    description: str | None, judged: bool = True, **more: tuple[Any, str]
) -> argparse.Namespace:
    """Parses options of (default, help) each, and those that :func:`conclude` takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if judged:
        parser.add_argument("--json", type=Path, help="write the rows here too")
        more["check"] = (False, "exit 1 where a goal is missed")
        more["note"] = (None, "on the machine: write the table that a page shows, with this note")
    for name, (default, said) in more.items():
        kind: dict[str, Any] = {"type": str if default is None else type(default)}
        if default is False:
            kind = {"action": "store_true"}
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, default=default, help=said, **kind)
    return parser.parse_args()


def console_of(width: int) -> Console:
    """Makes a console as wide as the terminal, or as a table needs it in a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


def conclude(
    rows: Sequence[Any],
    goals: Sequence[Goal],
    options: argparse.Namespace,
    console: Console,
    published: Published | None = None,
) -> None:
    """Prints the published table; writes the rows, dataclasses, and judges them, where asked to.

    `python -m tests.contract --pages` brings a table onto its page.

    Raises:
        SystemExit: a goal is missed.
    """
    if published is not None:
        console.print(published.drawn())
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    if options.note is not None and published is not None:
        from tests.played import write_table

        name, made_by, release, columns, shown = published
        write_table(_DATA / f"{name}.json", made_by, release, options.note, columns, shown)
    if options.check and not are_met(goals, console):
        sys.exit(1)


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 2
) -> Table:
    """Makes a table whose first ``texts`` columns are text, and the others numbers."""
    from rich.table import Table

    table = Table(title=title or None)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < texts else "right")
    for row in rows:
        table.add_row(*row)
    return table


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def chosen(text: str | None, names: Sequence[str], option: str) -> list[str]:
    """Returns the names of a list by commas, in the order of ``names``; all for None.

    Raises:
        BadOptions: there is none of a name.
    """
    asked = list(names) if text is None else [name.strip() for name in text.split(",")]
    if not set(asked) <= set(names):
        raise BadOptions(
            f"{option}: expected some of {', '.join(names)}, found {text!r}", "name some of these"
        )
    return [name for name in names if name in asked]


def work_folder(asked: str | None, name: str, console: Console) -> Path:
    """Makes the folder for logs and models, and prints it; one of a run's own for None."""
    folder = Path(asked or tempfile.mkdtemp(prefix=f"kvpatch-{name}-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"logs: {folder}", highlight=False)
    return folder


def importable_in_engines(*folders: Path) -> None:
    """Puts the checkout first on ``PYTHONPATH``, which every engine inherits; then the folders."""
    paths = (str(ROOT), *map(str, folders), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def show_said(where: str, said: Mapping[str, int], console: Console) -> None:
    """Prints a line for each thing that failures said, and how often."""
    for text, times in sorted(said.items()):
        line = f"{where}: {times} x {text}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
