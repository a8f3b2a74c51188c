"""Measures one run of a read: where the threshold between direct and staged comes from.

    python experiments/bench_runs.py [--mib 64] [--most 100000] [--device cuda] [--json FILE]

Two processes on this machine, one NIXL agent each (UCX): the same memory is read in runs of
one size, scattered on both sides. From the rows follow the two numbers of Costs
(kvpatch/geometry/overlap.py): seconds a run, from the small ones, and bytes a second, from
the large ones. A strided copy of as many bytes out of a staging buffer is timed beside them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
from bench_transfer import THREADS, wait_for_transfer
from harness import conclude, console_of, options_of, table_of
from rich.progress import track

from kvpatch.tools.verify.workers import WorkerMemory, beside_prefill
from kvpatch.transfer.nixl import prepare_read

SIZES = tuple(1 << power for power in range(7, 21))
REPEAT = 3


@dataclass(frozen=True)
class Row:
    """The median seconds of reads in runs of one size."""

    run_bytes: int
    runs: int
    seconds: float


def measure(decode: WorkerMemory, total: int, size: int, most: int) -> Row:
    """Reads in runs of `size` bytes."""
    order = np.random.default_rng(0).permutation
    runs = min(total // size, most)
    remote = decode.remote_address + order(total // size)[:runs] * size
    local = decode.memory.data_ptr() + order(total // size)[:runs] * size
    found = []
    for _ in range(REPEAT):
        started = time.perf_counter()
        read = prepare_read(decode.agent, decode.ends, remote, local, np.full(runs, size))
        wait_for_transfer(decode.agent, read)
        found.append(time.perf_counter() - started)
    return Row(size, runs, statistics.median(found))


def copy_bytes_per_second(total: int) -> float:
    """Times a strided copy such as place.py makes: rows of 8 heads change places."""
    source = np.zeros((total // 65536, 16, 8, 512), dtype=np.uint8)
    target = np.zeros((total // 65536, 8, 16, 512), dtype=np.uint8)
    blocks = np.random.default_rng(1).permutation(len(target))
    found = []
    for _ in range(REPEAT + 1):
        started = time.perf_counter()
        target[blocks] = source.transpose(0, 2, 1, 3)
        found.append(time.perf_counter() - started)
    return source.nbytes / statistics.median(found[1:])


def main() -> None:
    """Measures and prints."""
    options = options_of(
        __doc__,
        mib=(64, "size of both memories"),
        most=(100_000, "runs in a row at most"),
        device=("cpu", "of both memories: cpu or cuda"),
    )
    console = console_of(120)
    total = options.mib * 1024**2
    with beside_prefill(options.device, total, THREADS) as decode:
        rows = [
            measure(decode, total, size, options.most)
            for size in track(SIZES, "reading", console=console)
        ]
    columns = ("bytes a run", "runs", "us a run", "GB/s")
    console.print(table_of("reads in runs of one size", columns, (
        (f"{row.run_bytes:,}", f"{row.runs:,}", f"{row.seconds / row.runs * 1e6:.2f}",
         f"{row.run_bytes * row.runs / row.seconds / 1e9:.2f}")
        for row in rows
    ), texts=0))  # fmt: skip
    small, large = rows[0], rows[-1]
    a_run = small.seconds / small.runs
    wire = large.run_bytes * large.runs / large.seconds
    found = f"{a_run * 1e6:.2f} us a run, {wire / 1e9:.1f} GB/s on the wire"
    if options.device == "cpu":  # experiments/gpu/placing.py has a device's copies
        copy = copy_bytes_per_second(total)
        staged = f"runs under about {a_run * copy / 1024:.0f} KiB are staged"
        found += f", {copy / 1e9:.1f} GB/s copied: {staged}"
    console.print(found)
    conclude(rows, (), options, console)


if __name__ == "__main__":
    main()
