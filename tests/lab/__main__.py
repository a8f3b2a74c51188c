"""``python -m tests.lab --release 0.32.0 [--patched] [--match TEXT] [--json FILE]``

Prints what a release makes of every case: like pairs, other geometries, and
the pairs that kvpatch exists for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.releases.fetch import fetch

from .case import Case, Report
from .cases import LAYOUTS, known_failures, like_pairs, other_geometries
from .host import Lab
from .releases import has_named_layouts, selected

_GROUPS = ("like", "geometries", "failures")
_COLOURS = {"identical": "green", "corrupt": "red", "refused": "yellow", "failed": "magenta"}


def main() -> int:
    """Plays the cases; the exit status is 1 if a like pair was not identical."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument(
        "--release", action="append", help="may be given again; default: one per generation"
    )
    parser.add_argument("--patched", action="store_true", help="kvpatch on, on both sides")
    parser.add_argument("--group", choices=_GROUPS, action="append", help="default: all")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="append a JSON line per case to this file")
    arguments = parser.parse_args()
    releases = arguments.release or selected()
    fetch(releases)
    console = Console(width=None if sys.stdout.isatty() else 210)
    broken = 0
    for release in releases:
        broken += _play(console, release, arguments)
    return 1 if broken else 0


def _play(console: Console, release: str, arguments: argparse.Namespace) -> int:
    like = [case for layout in LAYOUTS for case in like_pairs(layout)]
    groups = {
        "like": like,
        "geometries": other_geometries(has_named_layouts(release)),
        "failures": known_failures(),
    }
    started = time.perf_counter()
    rows: list[tuple[Case, Report]] = []
    with Lab(release) as lab:
        for case in (c for group in arguments.group or _GROUPS for c in groups[group]):
            if arguments.match not in case.name:
                continue
            played = case.patched() if arguments.patched else case
            rows.append((case, lab.run(played)))
    seconds = time.perf_counter() - started
    side = "kvpatch" if arguments.patched else "stock"
    console.print(_table(f"vLLM {release}, {side}, {seconds:.1f} s", rows))
    if arguments.json:
        with arguments.json.open("a") as file:
            for case, report in rows:
                line = {"release": release, "side": side, "case": case.name, **asdict(report)}
                file.write(json.dumps(line) + "\n")
    return sum(report.outcome != "identical" for case, report in rows if case in like)


def _table(title: str, rows: list[tuple[Case, Report]]) -> Table:
    table = Table(title=title)
    for name in ("case", "outcome"):
        table.add_column(name, no_wrap=True)
    for name in ("wrong", "of", "moved", "stray", "reads", "regions", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("detail", max_width=90)
    for case, report in rows:
        numbers = (
            report.wrong_elements,
            report.total_elements,
            report.moved_tokens,
            report.stray_bytes,
            report.descriptors,
            report.registrations,
        )
        table.add_row(
            case.name,
            f"[{_COLOURS[report.outcome]}]{report.outcome}[/]",
            *(str(number) for number in numbers),
            f"{report.seconds:.1f}",
            escape(report.detail.partition("\n")[0][:180]),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
