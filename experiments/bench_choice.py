"""Whether the way of a read that is chosen is the faster one.

    python experiments/bench_choice.py [--mib 64] [--repeat 9] [--json FILE] [--check]

For every pair of bench_transfer.py: direct and staged reads by turns, in the progress thread as in
an engine, and the way that is chosen between them by the costs that are built in, by those that
the probe measures here before anything was read, and by those that a worker has found after some
reads of its own ("after reads": it began with the probe's, and read each time the way that it
chose). The loss is what the chosen way takes longer than the faster one, by the least time of
each; with --check it is no more than 10 % for the probe's choice and for the worker's.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from bench_transfer import DRAM, PAIRS, Decode, Pair, Setup, beside_prefill
from goals import Goal, add_options, conclude, console_of
from rich.console import Console
from rich.table import Table

from kvpatch.geometry.direct_or_staged import HOST_MEMORY, Costs, is_direct
from kvpatch.transfer.agent_gate import ProgressAgent
from kvpatch.transfer.cost_probe import CostProbe
from kvpatch.transfer.read_times import Metered, ReadTimes, Stopwatch

MOST_LOSS = 0.10
#: That a worker reads, one after the other, before its choice is looked at.
OWN_READS = 8


@dataclass
class Chosen:
    """One pair; seconds are the least of the repeats."""

    model: str
    pair: str
    direct_seconds: float
    staged_seconds: float
    built_in: str
    probe: str
    own_reads: str
    probe_loss: float
    own_reads_loss: float


def costs_here(setup: Setup) -> Costs:
    """As the probe of a worker measures them."""
    probe = CostProbe(ProgressAgent(setup.decode.agent, setup.gate), setup.pool, DRAM)
    for _ in probe.pieces():
        time.sleep(1e-3)
    if probe.costs is None:
        raise SystemExit("the probe has failed: see the log of kvpatch.staging at DEBUG")
    return probe.costs


def way(setup: Setup, costs: Costs) -> str:
    """What is chosen."""
    return "direct" if is_direct(setup.overlaps[0], setup.segments(), costs) else "staged"


def way_after_reads(setup: Setup, start: Costs) -> str:
    """What is chosen by a worker that has read from its peer, each time as it chose."""
    times, stopwatch = ReadTimes(), Stopwatch()
    for _ in range(OWN_READS):
        is_direct_ = way(setup, times.costs(start)) == "direct"
        copied_bytes = 0 if is_direct_ else setup.total_bytes
        setup.in_thread(is_direct=is_direct_, metered=Metered(times, stopwatch, copied_bytes))
    return way(setup, times.costs(start))


def measure(pair: Pair, mib: int, repeat: int, decode: Decode) -> Chosen:
    """One pair's row."""
    setup = Setup(pair, pair.tokens_in(mib * 1024**2), decode)
    for is_direct_ in (True, False):
        setup.in_thread(is_direct=is_direct_)
    setup.check()
    seconds: dict[str, list[float]] = {"direct": [], "staged": []}
    for _ in range(repeat):
        for name, found in seconds.items():
            started = time.perf_counter()
            setup.in_thread(is_direct=name == "direct")
            found.append(time.perf_counter() - started)
    least = {name: min(found) for name, found in seconds.items()}
    start = costs_here(setup)
    first, last = way(setup, start), way_after_reads(setup, start)
    setup.thread.stop()
    faster = min(least.values())
    return Chosen(
        pair.model.name,
        str(pair),
        least["direct"],
        least["staged"],
        way(setup, HOST_MEMORY),
        first,
        last,
        least[first] / faster - 1,
        least[last] / faster - 1,
    )


def show(rows: list[Chosen], console: Console) -> None:
    """The table."""
    table = Table("P -> D", "direct ms", "staged ms", "built in", "probe", "after reads", "loss %")
    for row in rows:
        table.add_row(
            row.pair, f"{row.direct_seconds * 1e3:.0f}", f"{row.staged_seconds * 1e3:.0f}",
            row.built_in, row.probe, row.own_reads,
            f"{row.probe_loss * 100:.0f}, {row.own_reads_loss * 100:.0f}",
        )  # fmt: skip
    console.print(table)


def goals(rows: list[Chosen]) -> list[Goal]:
    """No choice costs more than a tenth."""
    found = []
    for row in rows:
        found.append(Goal(f"{row.pair}, loss of the probe's choice", row.probe_loss, MOST_LOSS))
        found.append(Goal(f"{row.pair}, loss after reads", row.own_reads_loss, MOST_LOSS))
    return found


def main() -> None:
    """Measures, prints, and judges where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the request's cache")
    parser.add_argument("--repeat", type=int, default=9)
    add_options(parser)
    options = parser.parse_args()
    console = console_of(150)
    size = 2 * options.mib * 1024**2
    rows = []
    with beside_prefill(size) as decode, console.status("measuring") as status:
        for pair in PAIRS:
            status.update(f"{pair}")
            rows.append(measure(pair, options.mib, options.repeat, decode))
    show(rows, console)
    conclude(rows, goals(rows), options, console)


if __name__ == "__main__":
    main()
