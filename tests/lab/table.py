"""``python -m tests.lab.table [--release R ...] [--processes 2] [--write]``

Plays the heterogeneous pairs of the tests on stock and with kvpatch on D, every release, and
keeps what came of it in docs/data/heterogeneous.json, from which docs/evidence/heterogeneous.md is
made: how many cells each makes identical, refuses, or corrupts silently. Releases that are not
played keep their rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvpatch.core.releases import RELEASES
from tests.played import Played, now
from tests.releases.fetch import fetch

from .case import Case, EngineSpec, Outcome
from .host import Lab
from .releases import tells_blocks
from .unlike import Dimensions, cases

SEED = 20
_DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = _DOCS / "evidence" / "heterogeneous.md"
DATA = _DOCS / "data" / "heterogeneous.json"
LETTERS: dict[Outcome, str] = {"identical": "I", "refused": "R", "failed": "F", "corrupt": "C"}
KINDS = ("smaller P blocks", "larger P blocks", "other layout", "CPU backend", "other ranks")


@dataclass(frozen=True)
class Cell:
    """What became of one case on one release."""

    release: str
    kind: str
    case: str
    stock: Outcome
    kvpatch: Outcome


def all_cases() -> list[Case]:
    """The pairwise selection of the tests, the CPU backend's pairs, unlike ranks."""
    found = list(cases(Dimensions(), SEED))
    for p, d in ((128, 32), (32, 128), (96, 64)):
        sides = (
            EngineSpec("cpu", block_tokens=n, planned_blocks=16, dtype="float32") for n in (p, d)
        )
        found.append(Case(f"cpu float32 P {p}, D {d}", *sides, prompt_tokens=150))
    for p_tp, d_tp in ((1, 2), (2, 1)):
        for layout in ("HND", "NHD"):
            prefill, decode = (
                EngineSpec("flash", layout, n, 16, dtype="float32", tp_size=tp)
                for n, tp in ((32, p_tp), (64, d_tp))
            )
            name = f"flash {layout} P 32 TP{p_tp}, D 64 TP{d_tp}"
            found.append(Case(name, prefill, decode, prompt_tokens=150))
    return found


def kind_of(case: Case) -> str:
    """Its row in the summary: the first that fits."""
    p, d = case.prefill, case.decode
    if p.family == "cpu":
        return "CPU backend"
    if p.tp_size != d.tp_size:
        return "other ranks"
    if p.block_tokens == d.block_tokens:
        return "other layout"
    return "smaller P blocks" if p.block_tokens < d.block_tokens else "larger P blocks"


def play(release: str) -> list[Cell]:
    """Every case on one release, stock and with kvpatch on D."""
    found = []
    with Lab(release) as lab:
        for case in all_cases():
            before = case if tells_blocks(release) else case.behind_another()
            stock = lab.run(before.stock())
            ours = lab.run(case.patched(prefill=False))
            found.append(Cell(release, kind_of(case), case.name, stock.outcome, ours.outcome))
    return found


def page(found: Sequence[Cell]) -> str:
    order = [case.name for case in all_cases()]
    found = sorted(found, key=lambda c: (RELEASES.index(c.release), order.index(c.case)))
    releases = [r for r in RELEASES if any(cell.release == r for cell in found)]
    silent = sum(cell.stock == "corrupt" for cell in found)
    stock, ours = Counter(cell.stock for cell in found), Counter(cell.kvpatch for cell in found)
    lines = [
        "# Heterogeneous pairs, release by release",
        "",
        "What do stock vLLM and kvpatch make of pairs with other blocks, layouts and ranks? The",
        "lab plays real connectors of both roles over real NIXL in host memory, and compares D's",
        "cache with P's element by element. kvpatch is on D alone. Caches are spoilt on each",
        "release, and what a run does not notice of that is not identical. `python -m",
        "tests.lab.table --write` makes docs/data/heterogeneous.json and this page.",
        "",
        "![Outcomes of 41 pairs on each release](../pictures/outcomes.svg)",
        "",
        f"{len(found)} cells: {len(found) // max(1, len(releases))} pairs on {len(releases)} "
        "releases.",
        f"The pairs are a pairwise selection (seed {SEED}) of block sizes 16 to 128, layouts,",
        "backends (FlashAttention, FlashInfer, MLA), prompts, prefix hits, element sizes and",
        "numbers of requests, and some of other numbers of ranks and of the CPU backend.",
        "",
        "| | identical | refused | not completed | corrupt |",
        "|---|---|---|---|---|",
        _sum_row("stock", stock),
        _sum_row("kvpatch on D", ours),
        "",
        "- Corrupt: the request is called done and D holds other bytes than P: wrong tokens with",
        f"  HTTP 200. Stock does that in **{silent}** cells.",
        "- Refused: the load fails and both engines go on, or one of them does not start.",
        "- Not completed: an engine ends, the request waits, or P never learns that it was read.",
        "",
        "`<= 0.20`, handshakes leave things open. There the operator of a D with kvpatch declares",
        "them ([why](../explanation/unstated.md)), and a stock D reads a prompt of five blocks",
        "first. On 0.10.0 D computes the tokens behind P's whole blocks. That counts as ok, though",
        "in all but some 15 of its 38 cells D loads no block.",
        "",
        "## Every release",
        "",
        "Each cell is stock → kvpatch on D, in pairs: ok (identical), no (refused or not",
        "completed), **wrong** (corrupt). Releases with the same row share it.",
        "",
        "| release | " + " | ".join(_heading(kind, found, releases) for kind in KINDS) + " |",
        "|---|" + "---|" * len(KINDS),
    ]
    rows = {release: _row(release, found) for release in releases}
    for first, span in spans_of(releases, lambda a, b: rows[a] == rows[b]):
        lines.append(f"| {span} | {rows[first]} |")
    lines += ["", "## What stock corrupts", "", "| pair | releases |", "|---|---|"]
    lines += _pairs(cell for cell in found if cell.stock == "corrupt")
    lines += ["", "## What kvpatch does not serve", "", "| pair | releases |", "|---|---|"]
    lines += _pairs((cell for cell in found if cell.kvpatch != "identical"), say_outcome=True)
    lines += [
        "",
        "The CPU backend's pairs fail between like engines there too. `<= 0.11.0` the connector",
        "does not know the device. 0.23 to 0.25 take a layer's first blocks for its keys and",
        "values, and a stock P does not start.",
    ]
    lines += [
        "",
        "## Played",
        "",
        "| releases | day | commit |",
        "|---|---|---|",
        *_played(releases),
    ]
    return "\n".join(lines) + "\n"


def _played(releases: Sequence[str]) -> Iterator[str]:
    """When the rows were played: releases of one run share a row."""
    played = known_runs()
    for first, span in spans_of(releases, lambda a, b: played.get(a) == played.get(b)):
        if first in played:
            yield f"| {span} | {played[first].date} | {played[first].commit} |"


def _sum_row(name: str, counts: Counter[Outcome]) -> str:
    order: tuple[Outcome, ...] = ("identical", "refused", "failed", "corrupt")
    return f"| {name} | " + " | ".join(str(counts[outcome]) for outcome in order) + " |"


def _heading(kind: str, found: Sequence[Cell], releases: Sequence[str]) -> str:
    count = sum(cell.kind == kind and cell.release == releases[0] for cell in found)
    return f"{kind} ({count})"


def _row(release: str, found: Sequence[Cell]) -> str:
    row = [cell for cell in found if cell.release == release]
    return " | ".join(_counts(cell for cell in row if cell.kind == kind) for kind in KINDS)


def _counts(cells: Iterable[Cell]) -> str:
    cells = list(cells)
    texts = []
    for counts in (Counter(c.stock for c in cells), Counter(c.kvpatch for c in cells)):
        no = counts["refused"] + counts["failed"]
        words = ((counts["identical"], "{} ok"), (no, "{} no"), (counts["corrupt"], "**{} wrong**"))
        texts.append(", ".join(text.format(count) for count, text in words if count))
    return " → ".join(texts)


def _pairs(cells: Iterable[Cell], *, say_outcome: bool = False) -> list[str]:
    """A row for each pair, with its releases; and for each outcome, where that is said."""
    outcomes: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        outcome = cell.kvpatch if say_outcome else ""
        outcomes.setdefault((cell.case, outcome), []).append(cell.release)
    rows = []
    for (case, outcome), releases in outcomes.items():
        said = {"": "", "failed": "not completed: "}.get(outcome, f"{outcome}: ")
        spans = spans_of([r for r in RELEASES if r in releases], are_neighbours)
        rows.append(f"| {case} | {said}{', '.join(span for _, span in spans)} |")
    return rows


def spans_of(
    releases: Sequence[str], together: Callable[[str, str], bool]
) -> Iterator[tuple[str, str]]:
    """Releases of which each goes together with the next: the first of them, and their name."""
    first = 0
    for end in range(1, len(releases) + 1):
        if end == len(releases) or not together(releases[end - 1], releases[end]):
            yield releases[first], " to ".join(dict.fromkeys((releases[first], releases[end - 1])))
            first = end


def are_neighbours(release: str, other: str) -> bool:
    return RELEASES.index(release) + 1 == RELEASES.index(other)


# -- what a page is made from ----------------------------------------------------


def known_page() -> str:
    return page(known_cells())


@cache
def known_cells() -> tuple[Cell, ...]:
    """Every cell of docs/data/heterogeneous.json; nothing of one that has other cases."""
    data = json.loads(DATA.read_text())
    by_name = {case.name: case for case in all_cases()}
    if data["pairs"] != list(by_name):
        return ()
    outcomes: dict[str, Outcome] = {letter: outcome for outcome, letter in LETTERS.items()}
    return tuple(
        Cell(release, kind_of(by_name[name]), name, outcomes[stock], outcomes[ours])
        for release, row in data["releases"].items()
        for name, stock, ours in zip(data["pairs"], row["stock"], row["kvpatch"], strict=True)
    )


def known_runs() -> dict[str, Played]:
    rows = json.loads(DATA.read_text())["releases"]
    return {release: Played(row["date"], row["commit"]) for release, row in rows.items()}


def keep(found: Sequence[Cell], runs: dict[str, Played]) -> None:
    pairs = [case.name for case in all_cases()]
    rows = {}
    for release in sorted(runs, key=RELEASES.index):
        by_case = {cell.case: cell for cell in found if cell.release == release}
        cells = [by_case[name] for name in pairs]
        rows[release] = vars(runs[release]) | {
            "stock": "".join(LETTERS[cell.stock] for cell in cells),
            "kvpatch": "".join(LETTERS[cell.kvpatch] for cell in cells),
        }
    letters = {letter: outcome for outcome, letter in LETTERS.items()}
    head = {"made_by": "python -m tests.lab.table --write", "letters": letters, "pairs": pairs}
    write_rows(DATA, head, rows)


def write_rows(path: Path, head: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
    """Writes a file of docs/data, a line for each row: a change shows as one."""
    text = json.dumps(head, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    path.write_text(f'{text},\n "releases": {{\n{lines}\n }}\n}}\n')


def _beside(found: Iterable[Cell]) -> list[Cell]:
    """What is known of releases that are not among these."""
    played = {cell.release for cell in found}
    return [cell for cell in known_cells() if cell.release not in played]


def main() -> None:
    """Plays and prints; exit status 1 where kvpatch corrupts."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.table", description=__doc__)
    parser.add_argument("--release", action="append", help="may be given again; default: all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {DATA.name} and {PAGE.name}")
    arguments = parser.parse_args()
    found: list[Cell] = []
    releases = list(arguments.release or RELEASES)
    fetch(releases)
    console = Console()
    context = multiprocessing.get_context("spawn")  # ports of its own for each
    pool = ProcessPoolExecutor(arguments.processes, context)
    with pool, Progress(console=console) as progress:
        task = progress.add_task("releases", total=len(releases))
        for done in as_completed(pool.submit(play, release) for release in releases):
            found += done.result()
            kept = _beside(found)
            if arguments.write:  # hours of them: none is lost
                known = known_runs()
                runs = {cell.release: known[cell.release] for cell in kept}
                keep([*kept, *found], runs | {cell.release: now() for cell in found})
            progress.advance(task)
    text = page([*_beside(found), *found])
    console.print(text, markup=False)
    if arguments.write:
        PAGE.write_text(text)
    if any(cell.kvpatch == "corrupt" for cell in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
