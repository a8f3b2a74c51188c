"""Measures what kvpatch costs a pair of like engines, which stays on the release's own path.

    python experiments/bench_like_pair.py [--release 0.32.0] [--repeat 100] [--json FILE]

One P, two stock D and one D with kvpatch, by turns in random order, after the handshake: the time
from the step that posts a read to the step that reports it, with the release's real connectors over
real NIXL (TCP). "cpu" is the processor time of D's step thread meanwhile. Each ratio is the median
over the turns, to the first stock D, with the interval that holds it in 95 of 100 drawings of
turns. The second stock D shows what the measurement cannot tell from 1.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from harness import conclude, console_of, options_of, table_of
from rich.progress import track

from tests.lab.case import EngineSpec
from tests.lab.host import Lab
from tests.lab.stage import Actor, Stage
from tests.releases.fetch import fetch

TOKENS = 1024
TURNS = 20
SIDES = ("stock", "stock again", "kvpatch")
_DRAWINGS = 2000
SPEC = EngineSpec(
    "flash", "HND", block_tokens=16, layers=16, kv_heads=4, head_dim=64, planned_blocks=4096
)


def cpu_seconds(pid: int) -> float:
    """Returns the processor seconds of a process's first thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def seconds_of(stage: Stage, prefill: Actor, decode: Actor) -> tuple[float, float]:
    """(passed, of a processor) from asking for a prompt of P's to hearing that it was read."""
    prompt = stage.prompt(TOKENS)
    (ask,) = prefill.compute(prompt)
    used, started = cpu_seconds(decode.process.pid), time.perf_counter()
    decode.ask(ask)
    seen = decode.watch(prompt)
    passed = time.perf_counter() - started
    used = cpu_seconds(decode.process.pid) - used
    if seen.waiting or decode.wrong(prompt)[0]:
        raise SystemExit(f"{decode.name}: {prompt.name} was not read rightly: {seen}")
    return passed, used


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(median, and the 95 % interval of it by drawing turns again)."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_DRAWINGS)
    )
    cut = _DRAWINGS // 40
    return statistics.median(ratios), medians[cut], medians[-1 - cut]


def measure(lab: Lab) -> dict[str, list[tuple[float, float]]]:
    """Takes as many turns as P has blocks for."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    order = list(found)
    with Stage(lab) as stage:
        prefill = stage.prefill(SPEC)
        sides = {name: stage.decode(SPEC, patched=name == "kvpatch") for name in found}
        for turn in range(TURNS + 1):
            random.shuffle(order)
            measured = {name: seconds_of(stage, prefill, sides[name]) for name in order}
            for name in sides if turn else ():  # the first one shakes hands
                found[name].append(measured[name])
    return found


@dataclass(frozen=True)
class Row:
    """One number of one D; ``of_stock`` is its median ratio to stock's, with an interval."""

    side: str
    what: str
    median_s: float
    least_s: float
    of_stock: tuple[float, float, float]


def rows_of(found: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """Compares each D's turns with stock's."""
    rows = []
    for column, what in enumerate(("passed", "cpu")):
        stock = [times[column] for times in found["stock"]]
        for name, times in found.items():
            own = [each[column] for each in times]
            ratio = interval([a / b for a, b in zip(own, stock, strict=True)])
            rows.append(Row(name, what, statistics.median(own), min(own), ratio))
    return rows


def main() -> None:
    options = options_of(
        __doc__, release=("0.32.0", "of vLLM"), repeat=(100, "turns of all pairs of caches")
    )
    console = console_of(120)
    fetch([options.release])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    with Lab(options.release) as lab:
        for _ in track(range(-(-options.repeat // TURNS)), "reading", console=console):
            for name, times in measure(lab).items():
                found[name] += times
    rows = rows_of(found)
    columns = ("D", "", "median ms", "least ms", "of stock")
    console.print(table_of(f"vLLM {options.release}", columns, (
        (row.side, row.what, f"{1e3 * row.median_s:.2f}", f"{1e3 * row.least_s:.2f}",
         "{:.3f} ({:.3f} to {:.3f})".format(*row.of_stock))
        for row in rows
    )))  # fmt: skip
    conclude(rows, (), options, console)


if __name__ == "__main__":
    main()
