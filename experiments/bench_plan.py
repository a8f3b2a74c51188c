"""How long a request is planned, against the number of blocks.

    python experiments/bench_plan.py [--blocks 10 100 1000 4000] [--json FILE] [--check]

As a worker plans: where two caches cross is known, once for a peer ("peer"). "direct" is all
runs of a read that goes straight to its place; "staged" is all chunks of one through the pool,
which are planned one by one while others are on their way, and "first" what it takes to the
first of them. Milliseconds: the median, and of direct plans the first of its kind, which costs
more where the allocator gets memory for the first time. "by itself" is the way that a worker in
host memory chooses; --check judges what that takes to its first post, for 1,000 blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from kvpatch.geometry.direct_plan import plan_runs
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.overlap import Overlap, overlaps_of
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList, Segments, pair_blocks
from kvpatch.geometry.staged_plan import Share, plan_chunks
from tests.geometry.whole_caches import CacheSizes, named_layout

LAYERS = 80
HEADS = 8
CHANNELS = 128
ITEM_BYTES = 2
MEMORY = Memory("DRAM")
CHUNK_BYTES = 8 * 1024**2


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode cache: layout and tokens of a block."""

    remote_layout: str
    remote_tokens: int
    local_layout: str
    local_tokens: int
    scattered: bool = True

    def __str__(self) -> str:
        order = "scattered" if self.scattered else "adjacent"
        return (
            f"{self.remote_layout} {self.remote_tokens} -> {self.local_layout} "
            f"{self.local_tokens}, {order}"
        )


PAIRS = (
    Pair("LBHNC", 16, "LBHNC", 16),
    Pair("LBHNC", 16, "LBHNC", 16, scattered=False),
    Pair("NHD", 16, "NHD", 16),
    Pair("HND", 128, "HND", 32),
    Pair("LBHNC", 64, "LBHNC", 48),
    Pair("LBNHC", 16, "LBHNC", 16),
    Pair("CPU_packed", 128, "CPU_packed", 32),
)


class Request:
    """Some blocks of a pair, read anew each time."""

    def __init__(self, pair: Pair, blocks: int) -> None:
        self._pair = pair
        # One behind the end, so that its last block is a partial one.
        self._tokens = blocks * pair.local_tokens - 1
        remote_blocks = -(-self._tokens // pair.remote_tokens)
        sizes = CacheSizes(
            LAYERS, remote_blocks + 1, HEADS, pair.remote_tokens, CHANNELS, ITEM_BYTES
        )
        remote = named_layout(pair.remote_layout).planes(sizes, 1 << 32, MEMORY)
        sizes = replace(sizes, blocks=blocks + 1, block_tokens=pair.local_tokens)
        local = named_layout(pair.local_layout).planes(sizes, 1 << 44, MEMORY)
        order = np.random.default_rng(0).permutation if pair.scattered else np.arange
        self._remote_ids, self._local_ids = order(remote_blocks), order(blocks)
        start = time.perf_counter()
        self._overlaps: tuple[Overlap, ...] = overlaps_of(_regions(remote), local)
        self.peer_seconds = time.perf_counter() - start

    def _segments(self) -> Segments:
        theirs = BlockList(self._remote_ids, self._pair.remote_tokens)
        ours = BlockList(self._local_ids, self._pair.local_tokens)
        return pair_blocks(theirs, ours, 0, self._tokens)

    def direct(self) -> tuple[int, float]:
        """The runs of a direct read, and the seconds."""
        start = time.perf_counter()
        copies = [copy for overlap in self._overlaps for copy in overlap.copies]
        plan = plan_runs([(self._segments(), copies)])
        return len(plan), time.perf_counter() - start

    def staged(self) -> tuple[int, float, float]:
        """The chunks of a staged read, the seconds to the first and to the last."""
        start = time.perf_counter()
        chunks = plan_chunks([Share(self._segments(), self._overlaps)], lambda: CHUNK_BYTES)
        next(chunks)
        first = time.perf_counter() - start
        count = 1 + sum(1 for _ in chunks)
        return count, first, time.perf_counter() - start


def _regions(planes: Sequence[Plane]) -> list[list[Plane]]:
    """Planes of a layer whose blocks lie inside one another are one region."""
    found: dict[tuple[object, ...], list[Plane]] = {}
    for plane in planes:
        stride = plane.strides_bytes.block
        apart = min(abs(plane.address - other.address) for other in planes if other is not plane)
        alone = () if apart < stride else (plane.content,)
        found.setdefault((plane.layer, *alone), []).append(plane)
    return list(found.values())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 100, 1000, 4000])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--most-runs", type=int, default=20_000_000, help="skip larger plans")
    options = parser.parse_args()
    table = Table(
        title=f"{LAYERS} layers, {HEADS} heads of {CHANNELS} channels of {ITEM_BYTES} bytes, ms"
    )
    for name in ("P -> D", "blocks", "peer", "runs", "direct", "once", "chunks", "first", "staged"):
        table.add_column(name, justify="left" if name == "P -> D" else "right")
    with Console().status("planning"):
        for pair in PAIRS:
            per_block = 0.0
            for blocks in options.blocks:
                request = Request(pair, blocks)
                row = [str(pair), f"{blocks:,}", _ms([request.peer_seconds])]
                if per_block * blocks <= options.most_runs:
                    direct = [request.direct() for _ in range(options.repeat)]
                    per_block = direct[0][0] / blocks
                    seconds = [seconds for _, seconds in direct]
                    row += [f"{direct[0][0]:,}", _ms(seconds), _ms(seconds[:1])]
                else:
                    row += ["", "", ""]
                staged = [request.staged() for _ in range(options.repeat)]
                firsts, totals = ([found[at] for found in staged] for at in (1, 2))
                table.add_row(*row, f"{staged[0][0]:,}", _ms(firsts), _ms(totals))
    Console().print(table)


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"


if __name__ == "__main__":
    main()
