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
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_transfer import Decode, Model, Pair, Setup, prefill_side
from goals import Goal, are_met
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpatch.transfer.nixl import prepare_read

_KIB = 1024
_LAYERS = 4
SIZES = tuple(kib * _KIB for kib in (1, 4, 16, 64, 256, 1024))
#: NIXL's own word for the side that asks.
_OURS = "NIXL_INIT_AGENT"


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
    lot = 4 * tokens
    pair = Pair(model, "LBHNC", tokens, "LBHNC", lot)
    return Setup(pair, max(1, total // model.token_bytes // lot) * lot, decode)


class Prepared:
    """All runs of one size that lie in both memories, prepared once."""

    def __init__(self, decode: Decode, run_bytes: int, total: int, runs: int) -> None:
        self._decode, self._runs = decode, runs
        agent = decode.agent
        count = total // run_bytes
        self._sides, self._chosen = [], []
        for seed, (name, address) in enumerate(
            ((_OURS, decode.memory.data_ptr()), (decode.ends.agent, decode.remote_address))
        ):
            found = np.empty((count, 3), dtype=np.uint64)
            found[:, 0] = address + np.arange(count) * run_bytes
            found[:, 1], found[:, 2] = run_bytes, 0
            self._sides.append(agent.prep_xfer_dlist(name, agent.get_xfer_descs(found, "DRAM")))
            self._chosen.append(np.random.default_rng(seed).permutation(count)[:runs])
        starts = (decode.memory.data_ptr(), decode.remote_address)
        self._local, self._remote = (
            start + chosen * run_bytes for start, chosen in zip(starts, self._chosen, strict=True)
        )
        self._length = np.full(runs, run_bytes)

    def by_index(self) -> float:
        """Seconds of preparing and posting; the read is over when this returns."""
        agent = self._decode.agent
        ours, theirs = self._sides
        return self._timed(
            lambda: agent.make_prepped_xfer(
                "READ", ours, self._chosen[0], theirs, self._chosen[1], b""
            )
        )

    def anew(self) -> float:
        """The same, with descriptors of its own."""
        decode = self._decode
        return self._timed(
            lambda: prepare_read(decode.agent, decode.ends, self._remote, self._local, self._length)
        )

    def _timed(self, make: Callable[[], Any]) -> float:
        agent = self._decode.agent
        started = time.perf_counter()
        handle = make()
        state = agent.transfer(handle)
        posted = time.perf_counter() - started
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")
        agent.release_xfer_handle(handle)
        return posted


def measure(decode: Decode, run_bytes: int, total: int, most: int, repeat: int) -> Row:
    """One size of runs."""
    total = min(total, most * run_bytes)
    setup = setup_of(decode, run_bytes, total)
    runs = setup.pair.model.layers * (setup.tokens // setup.pair.remote_tokens)
    prepared = Prepared(decode, run_bytes, decode.memory.numel(), runs)
    posts: dict[str, list[float]] = {"prepared": [], "anew": []}
    seconds: dict[str, list[float]] = {"prepared": [], "anew": [], "kvpatch": []}
    descriptors, _ = setup.in_thread(is_direct=True)
    setup.check()
    if not 0.97 * runs <= descriptors <= runs:  # a few touch by chance, and are one
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
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    total = options.mib * 1024**2
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    prefill = context.Process(target=prefill_side, args=(theirs, total), daemon=True)
    prefill.start()
    decode = Decode(total, ours)
    rows = [
        measure(decode, size, total, options.most, options.repeat)
        for size in track(SIZES, "reading", console=console)
    ]
    show(rows, console)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    ours.send(None)
    prefill.join()
    if options.check and not are_met(goals(rows), console):
        sys.exit(1)


if __name__ == "__main__":
    main()
