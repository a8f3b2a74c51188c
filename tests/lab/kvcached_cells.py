"""kvcached's layouts on each release: what its own NIXL patch and kvpatch make of them.

``python -m tests.lab.kvcached_cells --write [RELEASE ...]`` plays every cell, keeps what came of it
in docs/data/kvcached.json, and writes the tables of docs/evidence/kvcached.md from that file;
releases that are not named keep their rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpatch.core.releases import RELEASES
from tests.contract import tables
from tests.played import Played, now
from tests.releases import kvcached

from .case import Allocation, Case, EngineSpec, Family, Report
from .child import KVCACHEDS_OWN
from .host import Lab
from .releases import ends_of_generations
from .table import spans_of

_DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = _DOCS / "evidence" / "kvcached.md"
_CELLS = _DOCS / "data" / "kvcached.json"
_MARKS = ("<!-- cells -->\n", "<!-- end of cells -->")

#: Release -> cell -> (kvcached's own patch's outcome, kvpatch's).
Cells = dict[str, dict[str, list[str]]]

FAMILIES: tuple[Family, ...] = ("flash", "flashinfer", "mla")
LAYOUTS: dict[str, Allocation] = {"contiguous": "kvcached_rows", "split-half": "kvcached_apart"}
#: Which sides have kvcached; a plain one is stock unless it is D under kvpatch.
SIDES = ("both", "P", "D")


def spec(family: Family, allocation: Allocation) -> EngineSpec:
    """kvcached reserves for more blocks than were planned; only used pages are there."""
    return EngineSpec(
        family, "NHD", planned_blocks=24, tensor_blocks=40, layers=3, allocation=allocation
    )


def case(family: Family, layout: str, side: str, *, by_kvpatch: bool) -> Case:
    allocation = LAYOUTS[layout]
    theirs = replace(spec(family, allocation))
    plain = EngineSpec(family, "NHD", planned_blocks=32, layers=3)
    if by_kvpatch:
        theirs, on = (replace(s, patched=True) for s in (theirs, plain))
        pair = {"both": (theirs, theirs), "P": (theirs, on), "D": (plain, theirs)}[side]
    else:
        contiguous = "true" if layout == "contiguous" else "false"
        settings = ((KVCACHEDS_OWN, "before"), ("KVCACHED_CONTIGUOUS_LAYOUT", contiguous))
        theirs = replace(theirs, settings=settings)
        pair = {"both": (theirs, theirs), "P": (theirs, plain), "D": (plain, theirs)}[side]
    return Case(f"{family} {layout} {side}", *pair, prompt_tokens=107)


def cells() -> Iterator[tuple[Family, str, str]]:
    for layout in LAYOUTS:
        for family in FAMILIES:
            for side in SIDES:
                yield family, layout, side


WORDS = {"identical": "works", "corrupt": "corrupts", "refused": "refused", "failed": "fails"}


def play(release: str) -> dict[str, list[str]]:
    """(kvcached's own, kvpatch's) outcome of each cell, by the cell's name."""
    found = {}
    with Lab(release) as lab:
        for cell in cells():
            reports: list[Report] = [
                lab.run(case(*cell, by_kvpatch=by_kvpatch)) for by_kvpatch in (False, True)
            ]
            found[" ".join(cell)] = [WORDS[report.outcome] for report in reports]
            print(release, *cell, *found[" ".join(cell)], flush=True)
    return found


def table(known: Cells) -> str:
    """The rows of all releases; neighbours with equal rows share one."""
    lines = []
    for layout in LAYOUTS:
        heads = [f"{family} {side}" for family in FAMILIES for side in SIDES]
        lines += [f"\n**{layout}** (kvcached's own patch → kvpatch)\n"]
        lines += ["| release | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        rows = {release: _row(found, layout) for release, found in known.items()}
        for first, span in spans_of(list(rows), lambda a, b, of=rows: of[a] == of[b]):
            lines.append(f"| {span} | {rows[first]} |")
    return "\n".join(lines) + "\n\n"


def _row(found: dict[str, list[str]], layout: str) -> str:
    outcomes = (found[f"{family} {layout} {side}"] for family in FAMILIES for side in SIDES)
    return " | ".join(" → ".join(outcome) for outcome in outcomes)


def read_cells() -> Cells:
    """What is known, in the order of the releases."""
    return {release: row["cells"] for release, row in _rows().items()}


def known_runs() -> dict[str, Played]:
    return {release: Played(row["date"], row["commit"]) for release, row in _rows().items()}


def _rows() -> dict[str, Any]:
    known = json.loads(_CELLS.read_text())["releases"]
    return {name: known[name] for name in RELEASES if name in known}


def known_page() -> str:
    return with_tables(PAGE.read_text(), read_cells())


def with_tables(document: str, known: Cells) -> str:
    start, end = document.index(_MARKS[0]) + len(_MARKS[0]), document.index(_MARKS[1])
    return tables.filled(document[:start] + table(known) + document[end:])


def keep(known: Cells, runs: dict[str, Played]) -> None:
    """Writes the file: one line a cell, so that a change shows as one."""
    rows = []
    for release in sorted(known, key=RELEASES.index):
        found = known[release]
        cells = ",\n".join(f"   {json.dumps(cell)}: {json.dumps(found[cell])}" for cell in found)
        run = json.dumps(vars(runs[release])).removesuffix("}")
        rows.append(f'  {json.dumps(release)}: {run}, "cells": {{\n{cells}\n  }}}}')
    head = '{\n "made_by": "python -m tests.lab.kvcached_cells --write",\n "releases": {\n'
    _CELLS.write_text(head + ",\n".join(rows) + "\n }\n}\n")
    PAGE.write_text(known_page())


def main(releases: list[str]) -> None:
    kvcached.fetch(kvcached.NEWEST)
    for release in releases or ends_of_generations():
        found = play(release)
        keep(read_cells() | {release: found}, known_runs() | {release: now()})


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        raise SystemExit(__doc__)
    main(sys.argv[2:])
