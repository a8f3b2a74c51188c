"""What a request takes to move between two caches of kvcached's, by layout, beside plain ones.

    python experiments/bench_kvcached.py [--release 0.32.0] [--rounds 10] [--json FILE]

The same prompt length and the same bytes between two like engines: plain caches without kvpatch,
kvcached's split halves and kvcached's contiguous layout with it, pair after pair in one run, the
order of each round by chance. kvcached's tensors are laid out by its own view code, in host memory
of which only the pages in use, of 2 MiB as on a GPU, can be accessed (its compiled part, which
needs CUDA, and CUDA's driver are stood in for); the connectors are the release's own, over real
NIXL. The clock runs in D's process, from the step that posts a request's read to the step that
reports it; pages are there before. "cpu" is what the thread that runs those steps took. Every read
is compared with what P wrote. Each ratio is the median over the turns, with the interval that holds
it in 95 of 100 drawings of turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.bench_like_pair import interval
from kvpatch.patches import SLUGS
from tests.lab.case import EngineSpec
from tests.lab.engine_api import Timed
from tests.lab.host import Lab
from tests.lab.kvcached_standin import PAGE
from tests.lab.stage import Stage
from tests.releases import kvcached
from tests.releases.fetch import fetch

TOKENS = 1024
TURNS = 8
_PLAIN = EngineSpec(
    "flash",
    "NHD",
    block_tokens=16,
    layers=16,
    kv_heads=4,
    head_dim=64,
    # A stage hands out no block twice.
    planned_blocks=(TURNS + 2) * TOKENS // 16,
)
_ON = replace(
    _PLAIN,
    patched=True,
    patches=SLUGS,
    tensor_blocks=4 * _PLAIN.planned_blocks,
    settings=((PAGE, str(2 * 1024**2)),),
)
SPECS = {
    "plain": _PLAIN,
    "split-half": replace(_ON, allocation="kvcached_apart"),
    "contiguous": replace(_ON, allocation="kvcached_rows"),
}
#: Of a request: tokens, layers, keys and values, heads, channels, bytes.
MOVED_BYTES = TOKENS * 16 * 2 * 4 * 64 * 2


def measure(lab: Lab, spec: EngineSpec, transports: str) -> list[Timed]:
    """Some reads between two engines of that cache; the first one shakes hands."""
    found = []
    with Stage(lab, transports) as stage:
        prefill, decode = stage.start(spec), stage.start(spec)
        for turn in range(TURNS + 1):
            prompt = stage.prompt(TOKENS)
            (ask,) = prefill.compute(prompt)
            timed = decode.timed(ask)
            wrong, total = decode.wrong(prompt)
            if wrong or total * spec.item_bytes != MOVED_BYTES:
                raise SystemExit(f"{decode.name}: {wrong} of {total} elements are wrong")
            if turn:
                found.append(timed)
    return found


@dataclass(frozen=True)
class Row:
    """One layout; ``of_plain`` is (median, and the 95 % interval of it)."""

    cache: str
    descriptors: int
    requests: int
    median_ms: float
    least_ms: float
    cpu_ms: float
    of_plain: tuple[float, float, float]


def rows_of(found: dict[str, list[Timed]]) -> list[Row]:
    """One for each layout, held against plain caches turn by turn."""
    rows = []
    for name, times in found.items():
        (descriptors,) = {timed.descriptors for timed in times}
        pairs = zip(times, found["plain"], strict=True)
        rows.append(
            Row(
                name,
                descriptors,
                len(times),
                statistics.median(timed.seconds for timed in times) * 1e3,
                min(timed.seconds for timed in times) * 1e3,
                statistics.median(timed.cpu_seconds for timed in times) * 1e3,
                interval([own.seconds / plain.seconds for own, plain in pairs]),
            )
        )
    return rows


def table(rows: list[Row], title: str) -> Table:
    """For people."""
    drawn = Table(title=title, title_justify="left")
    drawn.add_column("cache")
    for heading in ("descriptors", "median ms", "least ms", "cpu ms", "GB/s", "of plain"):
        drawn.add_column(heading, justify="right")
    for row in rows:
        ratio, low, high = row.of_plain
        drawn.add_row(
            row.cache,
            f"{row.descriptors:,}",
            f"{row.median_ms:.2f}",
            f"{row.least_ms:.2f}",
            f"{row.cpu_ms:.2f}",
            f"{MOVED_BYTES / row.median_ms / 1e6:.2f}",
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
        )
    return drawn


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--transports", default="self,tcp", help="UCX_TLS of both engines")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    fetch([options.release])
    kvcached.fetch(kvcached.NEWEST)
    found: dict[str, list[Timed]] = {name: [] for name in SPECS}
    order = list(SPECS)
    with Lab(options.release) as lab:
        for _ in track(range(options.rounds), "reading", console=console):
            random.shuffle(order)
            for name in order:
                found[name] += measure(lab, SPECS[name], options.transports)
    rows = rows_of(found)
    count = len(found["plain"])
    title = (
        f"vLLM {options.release}, UCX_TLS={options.transports}: {TOKENS} tokens, "
        f"{MOVED_BYTES // 2**20} MiB a request, {count} requests of each"
    )
    console.print(table(rows, title))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
