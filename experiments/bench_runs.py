"""Measures one run of a read: where the threshold between direct and staged comes from.

    python experiments/bench_runs.py [--mib 64] [--most 100000] [--device cuda] [--json FILE]

Two processes on this machine, one NIXL agent each (UCX): the same memory is read in runs of
one size, scattered on both sides. From the rows follow the two numbers of Costs
(kvpatch/geometry/overlap.py): seconds a run, from the small ones, and bytes a second, from
the large ones. A strided copy of as many bytes out of a staging buffer is timed beside them.

A second table has runs in lots of equal steps, as a direct plan has them: posted as kvpatch does,
and by NIXL's strided descriptors (from 1.5 on), one for each lot.
"""

from __future__ import annotations

import inspect
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench_transfer import THREADS, wait_for_transfer
from harness import conclude, console_of, options_of, table_of
from rich.progress import track

from kvpatch.tools.verify.workers import WorkerMemory, beside_prefill
from kvpatch.transfer.nixl import prepare_read

SIZES = tuple(1 << power for power in range(7, 21))
REPEAT = 3
#: Runs that one strided descriptor stands for.
LOT = 16


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


@dataclass(frozen=True)
class Posting:
    """The median nanoseconds a run: until its read is ready to be posted, and until it is done."""

    run_bytes: int
    runs: int
    way: str
    descriptor_bytes: int
    ready_ns: float
    done_ns: float


def measure_posting(decode: WorkerMemory, total: int, size: int, most: int) -> list[Posting]:
    """Reads every second run of `size` bytes, in lots of 16, along both ways."""
    lots = min(total // size, most) // (2 * LOT)
    runs, step = lots * LOT, 2 * size
    order = np.random.default_rng(0).permutation
    starts = [
        at + order(lots) * LOT * step for at in (decode.memory.data_ptr(), decode.remote_address)
    ]
    local, remote = ((start[:, None] + np.arange(LOT) * step).reshape(-1) for start in starts)
    kind, indices = decode.kind.kind, np.arange(runs, dtype=np.int32)

    def as_today() -> tuple[Any, tuple[Any, ...]]:
        return prepare_read(decode.agent, decode.ends, remote, local, np.full(runs, size)), ()

    def strided() -> tuple[Any, tuple[Any, ...]]:
        lists = []
        for agent, start in zip(("NIXL_INIT_AGENT", decode.ends.agent), starts, strict=True):
            described = np.full((lots, 5), (0, size, 0, step, LOT), dtype=np.uint64)
            described[:, 0] = start
            lists.append(decode.agent.prep_xfer_dlist(agent, described, kind))
        ours, theirs = lists
        read = decode.agent.make_prepped_xfer("READ", ours, indices, theirs, indices, b"")
        return read, (ours, theirs)

    rows = []
    # Numbers of 8 bytes; the indices of both sides are as many of 4.
    for way, make, numbers in (
        ("each run", as_today, 2 * 3 * runs),
        ("lots", strided, 2 * 5 * lots + runs),
    ):
        found = []
        for _ in range(REPEAT):
            started = time.perf_counter()
            read, lists = make()
            ready = time.perf_counter()
            wait_for_transfer(decode.agent, read)
            found.append((ready - started, time.perf_counter() - started))
            for one in lists:
                decode.agent.release_dlist_handle(one)
        ready, done = (
            1e9 * statistics.median(column) / runs for column in zip(*found, strict=True)
        )
        rows.append(Posting(size, runs, way, 8 * numbers, ready, done))
    return rows


def has_strided(decode: WorkerMemory) -> bool:
    """True if this NIXL takes one descriptor for several runs."""
    return "stride" in (inspect.getdoc(decode.agent.prep_xfer_dlist) or "")


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
        postings = [
            row
            for size in (SIZES[1], SIZES[4], SIZES[7], SIZES[9])
            if has_strided(decode)
            for row in measure_posting(decode, total, size, options.most)
        ]
    columns = ("bytes a run", "runs", "us a run", "GB/s")
    console.print(table_of("reads in runs of one size", columns, (
        (f"{row.run_bytes:,}", f"{row.runs:,}", f"{row.seconds / row.runs * 1e6:.2f}",
         f"{row.run_bytes * row.runs / row.seconds / 1e9:.2f}")
        for row in rows
    ), texts=0))  # fmt: skip
    columns = ("bytes a run", "runs", "descriptors", "their bytes", "ns a run: ready", "done")
    console.print(table_of("runs of equal steps, in lots of 16", columns, (
        (f"{row.run_bytes:,}", f"{row.runs:,}", row.way, f"{row.descriptor_bytes:,}",
         f"{row.ready_ns:.0f}", f"{row.done_ns:.0f}")
        for row in postings
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
    conclude([*rows, *postings], (), options, console)


if __name__ == "__main__":
    main()
