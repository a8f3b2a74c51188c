"""Measures what kvpatch costs a pair of like engines, which stays on the release's own path.

    python experiments/bench_like_pair.py [--release 0.32.0] [--repeat 100] [--json FILE]

One P, three D of its geometry, two stock and one with kvpatch, in turns, their order by
chance: the time from the step that posts a request's read to the step that reports it,
with the release's real connectors over real NIXL (TCP). Only what comes after the handshake
is timed. "cpu" is what the thread that runs D's steps took of a processor meanwhile: all
that kvpatch adds is in it, and what other work on the machine adds is not. Each ratio is the
median over the turns, to the first stock D of the same turn, with the interval that holds it
in 95 of 100 drawings of turns. The second stock D shows what the measurement cannot tell from 1.
"idle step" is what a step of D with nothing to load takes of a processor: scheduler's and
worker's half of the connector, every call of vLLM's; the least of each kind is the step itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.case import EngineSpec
from tests.lab.host import Lab
from tests.lab.stage import Actor, Stage
from tests.releases.fetch import fetch

TOKENS = 1024
TURNS = 20
SIDES = ("stock", "stock again", "kvpatch")
_DRAWINGS = 2000
_IDLE_STEPS = 2000
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


def measure(lab: Lab, idle: dict[str, list[float]]) -> dict[str, list[tuple[float, float]]]:
    """Takes as many turns as P has blocks for, and some idle steps."""
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
        for name in random.sample(order, len(order)):
            idle[name].append(float(sides[name].call("idle", _IDLE_STEPS)))
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    console = Console()
    fetch([options.release])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    idle: dict[str, list[float]] = {name: [] for name in SIDES}
    with Lab(options.release) as lab:
        for _ in track(range(-(-options.repeat // TURNS)), "reading", console=console):
            for name, times in measure(lab, idle).items():
                found[name] += times
    table = Table("D", "", "median ms", "least ms", "of stock", title=f"vLLM {options.release}")
    rows = []
    for column, what in enumerate(("passed", "cpu")):
        stock = [times[column] for times in found["stock"]]
        for name, times in found.items():
            own = [each[column] for each in times]
            ratio = interval([a / b for a, b in zip(own, stock, strict=True)])
            rows.append((name, what, statistics.median(own), min(own), *ratio))
            table.add_row(
                name, what, f"{statistics.median(own) * 1e3:.2f}", f"{min(own) * 1e3:.2f}",
                f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})",
            )  # fmt: skip
    for name, each in idle.items():
        rows.append((name, "idle step", statistics.median(each), min(each), None, None, None))
        table.add_row(
            name, "idle step", f"{statistics.median(each) * 1e3:.4f}", f"{min(each) * 1e3:.4f}", ""
        )
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
