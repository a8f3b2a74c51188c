"""Direct reads beside stock's read in blocks as small as their runs.

    python experiments/bench_direct.py [--mib 128] [--repeat 9] [--json FILE] [--check]

Two processes of this machine, one NIXL agent each. Stock prepares all its descriptors once for
each peer and posts by their indices. "prepared" does so for runs of one size; "made anew" gives
NIXL the same runs as descriptors of one read; "kvpatch" is a direct read of blocks of another
size that has such runs, with all that it takes: pairing, planning, posting in the progress thread.
The ways take turns. "post" is what preparing and posting alone take, without the bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench_transfer import Decode, Model, Pair, Setup, beside_prefill
from goals import Goal, add_options, conclude, console_of
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpatch.transfer.nixl import prepare_read

_KIB = 1024
_LAYERS = 4
SIZES = tuple(kib * _KIB for kib in (1, 4, 16, 64, 256, 1024))


@dataclass
class Row:
    """Runs of one size; seconds are medians, ratios of the same turn."""

    run_bytes: int
    runs: int
    prepared_seconds: float
    anew_seconds: float
    kvpatch_seconds: float
    prepared_post_seconds: float
    anew_post_seconds: float
    anew_of_prepared: float
    kvpatch_of_prepared: float


def setup_of(decode: Decode, run_bytes: int, total: int) -> Setup:
    """Blocks of D four times P's, of one head: each block of P's is one run, keys and values."""
    model = Model(f"runs of {run_bytes // _KIB} KiB", _LAYERS, 1, 128, 2)
    tokens = run_bytes * model.layers // model.token_bytes
    pair = Pair(model, "LBHNC", tokens, "LBHNC", 4 * tokens)
    return Setup(pair, pair.tokens_in(total), decode)


class Prepared:
    """All runs of one size that lie in both memories, prepared once; some of them are read."""

    def __init__(self, decode: Decode, run_bytes: int, runs: int) -> None:
        self._decode = decode
        count = decode.memory.numel() // run_bytes
        self._sides = decode.prepared(count, run_bytes)
        self._ours, self._theirs = (
            np.random.default_rng(seed).permutation(count)[:runs] for seed in (0, 1)
        )
        self._local = decode.memory.data_ptr() + self._ours * run_bytes
        self._remote = decode.remote_address + self._theirs * run_bytes
        self._length = np.full(runs, run_bytes)

    def by_index(self) -> float:
        """Seconds of preparing and posting; the read is over when this returns."""
        ours, theirs = self._sides
        make = self._decode.agent.make_prepped_xfer
        return self._timed(lambda: make("READ", ours, self._ours, theirs, self._theirs, b""))

    def anew(self) -> float:
        """The same, with descriptors of its own."""
        agent, ends = self._decode.agent, self._decode.ends
        return self._timed(
            lambda: prepare_read(agent, ends, self._remote, self._local, self._length)
        )

    def _timed(self, make: Callable[[], Any]) -> float:
        started = time.perf_counter()
        return self._decode.wait(make()) - started


def measure(decode: Decode, run_bytes: int, total: int, most: int, repeat: int) -> Row:
    """One size of runs."""
    total = min(total, most * run_bytes)
    setup = setup_of(decode, run_bytes, total)
    runs = setup.pair.model.layers * (setup.tokens // setup.pair.remote_tokens)
    prepared = Prepared(decode, run_bytes, runs)
    posts: dict[str, list[float]] = {"prepared": [], "anew": []}
    seconds: dict[str, list[float]] = {"prepared": [], "anew": [], "kvpatch": []}
    descriptors, _ = setup.in_thread(is_direct=True)
    setup.check()
    # A few blocks lie beside each other by chance, in every layer, and are read as one.
    if not runs - 8 * _LAYERS <= descriptors <= runs:
        raise SystemExit(f"expected {runs} runs of {run_bytes} bytes, found {descriptors}")

    def kvpatch() -> float:
        setup.in_thread(is_direct=True)
        return 0.0

    ways = {"prepared": prepared.by_index, "anew": prepared.anew, "kvpatch": kvpatch}
    for _ in range(repeat):
        for way, run in ways.items():
            started = time.perf_counter()
            post = run()
            seconds[way].append(time.perf_counter() - started)
            if way in posts:
                posts[way].append(post)
    setup.thread.stop()

    def beside(way: str) -> float:
        pairs = zip(seconds["prepared"], seconds[way], strict=True)
        return statistics.median(stock / own for stock, own in pairs)

    middle = {way: statistics.median(found) for way, found in seconds.items()}
    return Row(
        run_bytes, runs, middle["prepared"], middle["anew"], middle["kvpatch"],
        statistics.median(posts["prepared"]), statistics.median(posts["anew"]),
        beside("anew"), beside("kvpatch"),
    )  # fmt: skip


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="runs of one size, scattered")
    for name in (
        "KiB a run", "runs", "prepared ms", "made anew ms", "kvpatch ms", "post ms: prepared",
        "made anew", "speed of prepared: anew", "kvpatch",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        times = (row.prepared_seconds, row.anew_seconds, row.kvpatch_seconds,
                 row.prepared_post_seconds, row.anew_post_seconds)  # fmt: skip
        table.add_row(
            str(row.run_bytes // _KIB), f"{row.runs:,}", *(f"{1e3 * each:.1f}" for each in times),
            f"{row.anew_of_prepared:.2f}", f"{row.kvpatch_of_prepared:.2f}",
        )  # fmt: skip
    console.print(table)


def goals(rows: list[Row]) -> list[Goal]:
    found = [
        Goal(f"{row.run_bytes // _KIB} KiB, of stock's speed", row.kvpatch_of_prepared, 0.95,
             is_least=True)
        for row in rows
        if row.run_bytes >= 4 * _KIB
    ]  # fmt: skip
    most = max(rows, key=lambda row: row.runs)
    ratio = most.anew_seconds / most.prepared_seconds
    return [*found, Goal(f"{most.runs:,} runs, of the time of prepared ones", ratio, 1.2)]


def main() -> None:
    """Measures, prints, and judges where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--most", type=int, default=100_000, help="runs of a read at most")
    parser.add_argument("--repeat", type=int, default=9)
    add_options(parser)
    options = parser.parse_args()
    console = console_of(150)
    total = options.mib * 1024**2
    with beside_prefill(total) as decode:
        rows = [
            measure(decode, size, total, options.most, options.repeat)
            for size in track(SIZES, "reading", console=console)
        ]
    show(rows, console)
    conclude(rows, goals(rows), options, console)


if __name__ == "__main__":
    main()
