"""What kvpatch costs a pair of like engines, which stays on the release's own path.

    python experiments/bench_like_pair.py [--release 0.32.0] [--repeat 15]

One P, two D of its geometry, one stock and one with kvpatch, in turns: the time from the
step that posts a request's read to the step that reports it, with the release's real
connectors over real NIXL (TCP). Only what comes after the handshake is timed.
"""

from __future__ import annotations

import argparse
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
SPEC = EngineSpec(
    "flash", "HND", block_tokens=16, layers=16, kv_heads=4, head_dim=64, planned_blocks=4096
)


def seconds_of(stage: Stage, prefill: Actor, decode: Actor) -> float:
    """From asking for a prompt that P has computed to hearing that it has been read."""
    prompt = stage.prompt(TOKENS)
    (ask,) = prefill.compute(prompt)
    started = time.perf_counter()
    decode.ask(ask)
    seen = decode.watch(prompt)
    passed = time.perf_counter() - started
    if seen.waiting or decode.wrong(prompt)[0]:
        raise SystemExit(f"{decode.name}: {prompt.name} was not read rightly: {seen}")
    return passed


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    console = Console()
    fetch([options.release])
    with Lab(options.release) as lab, Stage(lab) as stage:
        prefill = stage.prefill(SPEC)
        sides = {
            "stock": stage.decode(SPEC, patched=False),
            "kvpatch": stage.decode(SPEC),
        }
        found: dict[str, list[float]] = {name: [] for name in sides}
        for turn in track(range(options.repeat + 1), "reading", console=console):
            for name, decode in sides.items():
                seconds = seconds_of(stage, prefill, decode)
                if turn:  # the first one shakes hands
                    found[name].append(seconds)
    table = Table("D", "median ms", "least ms", "of stock", title=f"vLLM {options.release}")
    stock = statistics.median(found["stock"])
    for name, times in found.items():
        median = statistics.median(times)
        table.add_row(
            name, f"{median * 1e3:.2f}", f"{min(times) * 1e3:.2f}", f"{median / stock:.3f}"
        )
    console.print(table)


if __name__ == "__main__":
    main()
