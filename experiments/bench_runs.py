"""Measures one run of a read: where the threshold between direct and staged comes from.

    python experiments/bench_runs.py [--mib 64] [--most 100000] [--device cuda] [--json FILE]

Two processes on this machine, one NIXL agent each (UCX): the same memory is read in runs of
one size, scattered on both sides. From the rows follow the two numbers of Costs
(kvpatch/geometry/overlap.py): seconds a run, from the small ones, and bytes a second, from
the large ones. A strided copy of as many bytes out of a staging buffer is timed beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from bench_transfer import Decode, beside_prefill
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpatch.transfer.nixl import prepare_read

SIZES = tuple(1 << power for power in range(7, 21))
REPEAT = 3


def seconds_of(decode: Decode, total: int, size: int, most: int) -> tuple[float, int]:
    """(median seconds, runs) of reading in runs of `size` bytes."""
    order = np.random.default_rng(0).permutation
    runs = min(total // size, most)
    remote = decode.remote_address + order(total // size)[:runs] * size
    local = decode.memory.data_ptr() + order(total // size)[:runs] * size
    found = []
    for _ in range(REPEAT):
        started = time.perf_counter()
        decode.wait(prepare_read(decode.agent, decode.ends, remote, local, np.full(runs, size)))
        found.append(time.perf_counter() - started)
    return statistics.median(found), runs


def copy_bytes_per_second(total: int) -> float:
    """A strided copy such as place.py makes: rows of 8 heads change places."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--most", type=int, default=100_000, help="runs in a row at most")
    parser.add_argument("--device", default="cpu", help="of both memories: cpu or cuda")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    console = Console()
    total = options.mib * 1024**2
    table = Table("bytes a run", "runs", "us a run", "GB/s", title="reads in runs of one size")
    rows = {}
    with beside_prefill(total, device=options.device) as decode:
        for size in track(SIZES, "reading", console=console):
            seconds, runs = rows[size] = seconds_of(decode, total, size, options.most)
            table.add_row(
                f"{size:,}", f"{runs:,}", f"{seconds / runs * 1e6:.2f}",
                f"{size * runs / seconds / 1e9:.2f}",
            )  # fmt: skip
    console.print(table)
    if options.json:
        found = [
            {"run_bytes": size, "runs": runs, "seconds": seconds}
            for size, (seconds, runs) in rows.items()
        ]
        options.json.write_text(json.dumps(found, indent=2))
    small, large = min(SIZES), max(SIZES)
    a_run = rows[small][0] / rows[small][1]
    wire = large * rows[large][1] / rows[large][0]
    if options.device != "cpu":  # experiments/gpu/placing.py has a device's copies
        console.print(f"{a_run * 1e6:.2f} us a run, {wire / 1e9:.1f} GB/s on the wire")
        return
    copy = copy_bytes_per_second(total)
    console.print(
        f"{a_run * 1e6:.1f} us a run, {wire / 1e9:.1f} GB/s on the wire, "
        f"{copy / 1e9:.1f} GB/s copied: runs under about {a_run * copy / 1024:.0f} KiB are staged"
    )


if __name__ == "__main__":
    main()
