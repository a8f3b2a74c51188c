"""Measures what kvpatch adds to a step of D without work, instrument by instrument.

    python experiments/bench_idle_step.py [--release 0.33.0] [--check] [--json FILE]

Like engines with the release's real connectors and its own scheduler. A step is every call that
vLLM makes of both halves of the connector. "us" is the thread's processor time for one step: the
least of 50 steps at a time. Every D has read and answered one prompt before. "of it" is the
difference to a D with kvpatch and without instruments.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from harness import Goal, conclude, console_of, options_of, table_of
from rich.progress import track

from kvpatch.core.releases import FACTS
from kvpatch.patches import SLUGS
from tests.lab.case import EngineSpec
from tests.lab.host import Lab
from tests.lab.stage import Actor, Stage
from tests.releases.fetch import fetch

SPEC = EngineSpec(
    "flash", "HND", block_tokens=16, layers=16, kv_heads=4, head_dim=64, planned_blocks=256
)
_STEPS, _ROUNDS, _TOKENS = 2000, 40, 256
_MOST_US = 5.0
_WITHOUT = tuple(slug for slug in SLUGS if slug not in ("stale_blocks", "digests"))


@dataclass(frozen=True)
class Row:
    """One D: the least of its steps, and what it adds to :data:`BASE`'s; None of stock's."""

    what: str
    us: float
    added_us: float | None = None


def _with(patches: tuple[str, ...], **settings: str) -> EngineSpec:
    own = tuple((f"KVPATCH_{name.upper()}", value) for name, value in settings.items())
    return replace(SPEC, patched=True, patches=patches, settings=own, own_scheduler=True)


STOCK, BASE = "stock", "kvpatch without instruments"
SIDES = {
    STOCK: replace(SPEC, own_scheduler=True),
    BASE: _with(_WITHOUT),
    "holds (the default)": _with(SLUGS),
    "holds and digests": _with(SLUGS, digest="all"),
}
_WANTED = ("holds (the default)",)


def measure(lab: Lab) -> list[Row]:
    with Stage(lab) as stage:
        prefill = stage.prefill(SPEC)
        sides = {name: stage.start(spec) for name, spec in SIDES.items()}
        for decode in sides.values():
            _read_one(stage, prefill, decode)
        found: dict[str, list[float]] = {name: [] for name in sides}
        counts = FACTS[lab.release].asks_scheduler_for_stats
        for _ in track(range(_ROUNDS), "stepping"):
            for name in random.sample(list(sides), len(sides)):
                found[name].append(float(sides[name].call("idle", _STEPS, counts)))
    least = {name: 1e6 * min(each) for name, each in found.items()}
    return [
        Row(name, us, None if name == STOCK else us - least[BASE]) for name, us in least.items()
    ]


def _read_one(stage: Stage, prefill: Actor, decode: Actor) -> None:
    """And answer it: what nobody waits for any more costs a step nothing."""
    prompt = stage.load(prefill, decode, _TOKENS)
    decode.call("loaded", [prompt.name])
    if not decode.finish(prompt).startswith("FINISHED"):
        raise SystemExit(f"{decode.name} does not answer a prompt that it has read")


def main() -> None:
    options = options_of(__doc__, release=("0.33.0", "of vLLM"))
    console = console_of(120)
    fetch([options.release])
    with Lab(options.release) as lab:
        rows = measure(lab)
    title = f"a step of vLLM {options.release}, nothing loaded"
    console.print(table_of(title, ("D", "us", "of it"), (
        (row.what, f"{row.us:.1f}", "" if row.added_us is None else f"{row.added_us:+.1f}")
        for row in rows
    ), texts=1))  # fmt: skip
    goals = [
        Goal(f"{row.what}: us added to a step", row.added_us or 0.0, _MOST_US)
        for row in rows
        if row.what in _WANTED
    ]
    conclude(rows, goals, options, console)


if __name__ == "__main__":
    main()
