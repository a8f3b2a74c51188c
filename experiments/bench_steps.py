"""How reads get on beside an engine that looks at them once a step.

    python experiments/bench_steps.py [--mib 256] [--requests 12] [--json FILE] [--check]

D's loop takes a step every 5, 20 and 50 ms: one that sleeps in it, as beside a GPU, and one that
computes in it (matrices, one thread). Four requests at a time are read through a pool that holds
a quarter of one; in each step the loop asks for the state of all, takes NIXL's notifications,
and starts the next ones. "a loop that only looks" does so without a pause. Beside the progress
thread stands the same without it (``KVPATCH_PROGRESS=step``), where a read goes on when it is
looked at.

"of looking" is the throughput beside the loop that only looks. "look ms" is what a step takes
for its looks (99th percentile, and the longest), "on it" the same without the time for which the
step's thread had no processor (Linux's schedstat): NIXL's threads, which never sleep, take turns
with it where there are few. "step ms more" is by how much steps that compute
are longer than steps of the same loop while nothing is read (99th percentiles). P and D are two
processes of this machine, whose transport reads in the call that posts.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from bench_transfer import GQA, Pair, Setup, beside_prefill
from goals import Goal, add_options, conclude, console_of
from rich.console import Console
from rich.table import Table

from kvpatch.transfer.own_read import OwnRead

PERIODS_MS = (5, 20, 50)
AT_ONCE = 4
PAIR = Pair(GQA, "LBNHC", 16, "LBHNC", 16)


@dataclass
class Row:
    """One loop; times in milliseconds."""

    loop: str
    period_ms: int
    driven_by: str
    gb_per_second: float
    of_looking: float
    look_p99_ms: float
    look_longest_ms: float
    on_processor_p99_ms: float
    on_processor_longest_ms: float
    step_more_p99_ms: float | None


class Taken(NamedTuple):
    """Seconds: of all requests, and of each step's looks and work."""

    seconds: float
    looks: list[float]
    on_processor: list[float]
    works: list[float]


class Loop:
    """D's engine: steps of one kind.

    Args:
        period_seconds: of a step; 0 for looking alone.
        work: what a step does for so many seconds.
    """

    def __init__(self, setup: Setup, period_seconds: float, work: Callable[[float], None]) -> None:
        self.setup = setup
        self.period_seconds = period_seconds
        self.work = work
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def run(self, make: Callable[[], OwnRead], requests: int) -> Taken:
        """All requests."""
        taken = Taken(0.0, [], [], [])
        left, going = requests, [make() for _ in range(AT_ONCE)]
        began = time.perf_counter()
        for read in going:
            read.start()
        left -= len(going)
        while going:
            came = time.perf_counter()
            if self.period_seconds:
                self.work(self.period_seconds)
            waited = self._waited()
            worked = time.perf_counter()
            states = [read.state() for read in going]
            self.setup.engine_agent.get_new_notifs()
            for number, state in enumerate(states):
                if state == "ERR":
                    raise RuntimeError("a read has failed")
                if state == "DONE" and left:
                    going[number] = make()
                    going[number].start()
                    left -= 1
            going = [read for read in going if read.state() != "DONE"]
            taken.looks.append(time.perf_counter() - worked)
            taken.on_processor.append(taken.looks[-1] - (self._waited() - waited))
            taken.works.append(worked - came)
        return taken._replace(seconds=time.perf_counter() - began)

    def _waited(self) -> float:
        """For how long this thread has been kept from a processor so far, in seconds."""
        return int(self._schedstat.read_text().split()[1]) / 1e9


def sleeps(seconds: float) -> None:
    """As beside a GPU."""
    time.sleep(seconds)


class Computes:
    """Matrix products of as many rounds as fit into a period, when nothing else goes on."""

    def __init__(self) -> None:
        self._matrix = torch.rand(384, 384)
        began, rounds = time.perf_counter(), 200
        self._rounds(rounds)
        self._a_second = rounds / (time.perf_counter() - began)

    def _rounds(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix)

    def __call__(self, seconds: float) -> None:
        self._rounds(max(1, round(seconds * self._a_second)))


def quantile_ms(seconds: list[float], part: float) -> float:
    return float(np.quantile(seconds, part)) * 1e3


def of_looks(taken: Taken) -> tuple[float, float, float, float]:
    """(99th percentile, longest) in milliseconds of all looks, and without waits."""
    return (
        quantile_ms(taken.looks, 0.99),
        max(taken.looks) * 1e3,
        quantile_ms(taken.on_processor, 0.99),
        max(taken.on_processor) * 1e3,
    )


def measure(setup: Setup, requests: int, console: Console) -> list[Row]:
    """All rows."""
    ways: dict[str, Callable[[], OwnRead]] = {
        "thread": lambda: setup.background(is_direct=False),
        "steps": setup.steps_read,
    }
    rows = []
    with console.status("measuring") as status:
        status.update("a loop that only looks")
        Loop(setup, 0.0, sleeps).run(ways["thread"], AT_ONCE)  # all memory touched
        setup.check()
        taken = Loop(setup, 0.0, sleeps).run(ways["thread"], requests)
        looking = requests * setup.total_bytes / taken.seconds / 1e9
        rows.append(Row("only looks", 0, "thread", looking, 1.0, *of_looks(taken), None))
        for name, work in (("sleeps", sleeps), ("computes", Computes())):
            for period_ms in PERIODS_MS:
                alone: list[float] = []
                for _ in range(max(20, 2000 // period_ms)):
                    began = time.perf_counter()
                    work(period_ms / 1e3)
                    alone.append(time.perf_counter() - began)
                for way, make in ways.items():
                    status.update(f"{name}, {period_ms} ms, {way}")
                    loop = Loop(setup, period_ms / 1e3, work)
                    taken = loop.run(make, requests)
                    speed = requests * setup.total_bytes / taken.seconds / 1e9
                    more = quantile_ms(taken.works, 0.99) - quantile_ms(alone, 0.99)
                    rows.append(
                        Row(name, period_ms, way, speed, speed / looking, *of_looks(taken), more)
                    )
        setup.check()
    return rows


def show(rows: list[Row], console: Console) -> None:
    table = Table(title=f"{PAIR.model.name}, {PAIR}")
    for name in (
        "a loop that", "every ms", "read goes on in", "GB/s", "of looking", "look ms, 99 %",
        "longest", "on it, 99 %", "longest", "step ms more, 99 %",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "a loop that" else "right")
    for row in rows:
        more = "" if row.step_more_p99_ms is None else f"{row.step_more_p99_ms:.2f}"
        table.add_row(row.loop, str(row.period_ms or ""), row.driven_by, f"{row.gb_per_second:.2f}",
                      f"{row.of_looking:.2f}", f"{row.look_p99_ms:.2f}",
                      f"{row.look_longest_ms:.2f}", f"{row.on_processor_p99_ms:.2f}",
                      f"{row.on_processor_longest_ms:.2f}", more)  # fmt: skip
    console.print(table)


def goals(rows: list[Row]) -> list[Goal]:
    own = [row for row in rows if row.driven_by == "thread" and row.period_ms]
    return [
        Goal("least throughput of looking", min(row.of_looking for row in own), 0.9, is_least=True),
        Goal("look ms, 99 %", max(row.look_p99_ms for row in own), 0.3),
        Goal("longest look ms", max(row.look_longest_ms for row in own), 2.0),
        Goal("look ms on the processor, 99 %", max(row.on_processor_p99_ms for row in own), 0.3),
        Goal("longest on it", max(row.on_processor_longest_ms for row in own), 2.0),
    ]


def main() -> None:
    """Measures, prints, and judges where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of a request's cache")
    parser.add_argument("--requests", type=int, default=12)
    add_options(parser)
    options = parser.parse_args()
    console = console_of(130)
    torch.set_num_threads(1)
    size = options.mib * 1024**2
    with beside_prefill(size) as decode:
        setup = Setup(PAIR, PAIR.tokens_in(size), decode, size // 4)
        rows = measure(setup, options.requests, console)
        setup.thread.stop()
    show(rows, console)
    conclude(rows, goals(rows), options, console)


if __name__ == "__main__":
    main()
