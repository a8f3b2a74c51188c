"""``python -m tests.lab.table [--release R ...] [--processes 2] [--cells FILE] [--write]``

Plays the unlike pairs of the tests on stock and with kvpatch on D, every release, and
writes docs/unlike.md: how many cells each makes identical, refuses, or corrupts silently.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvpatch._versions import RELEASES
from kvpatch.patches import SLUGS
from tests.releases.fetch import fetch

from .case import Case, EngineSpec, Outcome, Report
from .host import Lab
from .unlike import Dimensions, cases, told

SEED = 20
PAGE = Path(__file__).resolve().parents[2] / "docs" / "unlike.md"
KINDS = ("smaller P blocks", "larger P blocks", "other layout", "CPU backend", "other ranks")


@dataclass(frozen=True)
class Cell:
    """What became of one case on one release."""

    release: str
    kind: str
    case: str
    stock: Outcome
    kvpatch: Outcome
    stock_detail: str = ""
    kvpatch_detail: str = ""


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
            stock = lab.run(case.stock())
            ours = lab.run(told(case, release).patched(*SLUGS, prefill=False))
            found.append(
                Cell(
                    release, kind_of(case), case.name, stock.outcome, ours.outcome,
                    _first_line(stock), _first_line(ours),
                )
            )  # fmt: skip
    return found


def _first_line(report: Report) -> str:
    return report.detail.partition("\n")[0][:200]


def page(found: Sequence[Cell]) -> str:
    """docs/unlike.md."""
    releases = [r for r in RELEASES if any(cell.release == r for cell in found)]
    silent = sum(cell.stock == "corrupt" for cell in found)
    ours = Counter(cell.kvpatch for cell in found)
    lines = [
        "# Unlike engines, release by release",
        "",
        "Written by `python -m tests.lab.table --write`: real connectors of both roles over real",
        "NIXL in host memory, D's cache compared with P's element by element. kvpatch is on D",
        "alone.",
        "",
        f"{len(found)} cells: {len(found) // max(1, len(releases))} pairs on {len(releases)} "
        "releases.",
        f"The pairs are a pairwise selection (seed {SEED}) of block sizes 16 to 128, layouts,",
        "backends (FlashAttention, FlashInfer, MLA), prompts, prefix hits, element sizes and",
        "numbers of requests, and some of unlike ranks and of the CPU backend.",
        "",
        f"Stock calls **{silent}** of them done and holds other bytes than P: wrong tokens with",
        f"HTTP 200. With kvpatch {ours['identical']} are identical, {ours['refused']} refused,",
        f"{ours['failed']} end without an answer, {ours['corrupt']} are corrupt.",
        "",
        "To 0.20 handshakes do not say all of a block. With kvpatch a prompt of five blocks goes",
        "before, which tells the rest; without it, D computes short prompts itself to 0.11.0, and",
        "fails some of FlashInfer's from 0.11.1 on. Refused with kvpatch: on 0.10.0, which states",
        "no layout either, unlike blocks of several heads; some releases serve no P/D on their CPU",
        "backend, or with such ranks, at all. Corrupt: an unlike layout that 0.10.0 does not state",
        "goes unnoticed, as in stock.",
        "",
        "Each cell: stock → kvpatch, as identical / refused or failed / **corrupt**.",
        "",
        "| release | " + " | ".join(KINDS) + " |",
        "|---|" + "---|" * len(KINDS),
    ]
    for release in releases:
        row = [cell for cell in found if cell.release == release]
        columns = (_counts(cell for cell in row if cell.kind == kind) for kind in KINDS)
        lines.append(f"| {release} | " + " | ".join(columns) + " |")
    return "\n".join(lines) + "\n"


def _counts(cells: Iterable[Cell]) -> str:
    cells = list(cells)
    sides = (Counter(c.stock for c in cells), Counter(c.kvpatch for c in cells))
    texts = []
    for counts in sides:
        corrupt = f"**{counts['corrupt']}**" if counts["corrupt"] else "0"
        texts.append(f"{counts['identical']}/{counts['refused'] + counts['failed']}/{corrupt}")
    return " → ".join(texts)


def _read(path: Path | None) -> list[Cell]:
    if path is None or not path.exists():
        return []
    return [Cell(**json.loads(line)) for line in path.read_text().splitlines()]


def _add(path: Path, cells: Iterable[Cell]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(vars(cell)) + "\n" for cell in cells)


def main() -> None:
    """Plays and prints; exit status 1 where kvpatch corrupts."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.table", description=__doc__)
    parser.add_argument("--release", action="append", help="may be given again; default: all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--cells", type=Path, help="a file of cells: its releases are not played, others are added"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    found = _read(arguments.cells)
    releases = [r for r in arguments.release or RELEASES if r not in {c.release for c in found}]
    fetch(releases)
    console = Console()
    context = multiprocessing.get_context("spawn")  # ports of its own for each
    pool = ProcessPoolExecutor(arguments.processes, context)
    with pool, Progress(console=console) as progress:
        task = progress.add_task("releases", total=len(releases))
        for done in as_completed(pool.submit(play, release) for release in releases):
            found += done.result()
            if arguments.cells:
                _add(arguments.cells, done.result())
            progress.advance(task)
    text = page(found)
    console.print(text, markup=False)
    if arguments.write:
        PAGE.write_text(text)
    if any(cell.kvpatch == "corrupt" for cell in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
