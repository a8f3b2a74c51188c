"""How long a request is planned, against the number of blocks.

    python experiments/bench_plan.py [--blocks 10 100 1000 4000] [--json FILE] [--check]

As a worker plans: where two caches cross is known, once for a peer ("peer"). "direct" is a read
that goes straight to its place, "staged" one through the pool. Both are planned in parts, one by
one while others are on their way: "first" is what it takes to the first of them, "all" to the last.
Milliseconds: the median, and "once" the first direct plan of its kind, which costs more where the
allocator gets memory for the first time. A star marks the way that a worker in host memory takes;
--check judges what its first part takes, for 1,000 blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from goals import Goal, add_options, conclude, console_of
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpatch.geometry.direct_plan import plan_parts
from kvpatch.geometry.overlap import HOST_MEMORY, Overlap, is_direct, overlaps_of
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList, Segments, pair_blocks
from kvpatch.geometry.staged_plan import Share, plan_chunks
from kvpatch.geometry.tensor_facts import Memory
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


class Planned(NamedTuple):
    """One planning: of so many runs or chunks, the seconds to the first part and to the last."""

    count: int
    first_seconds: float
    all_seconds: float


@dataclass(frozen=True)
class Row:
    """One pair and length; ``once`` is the first direct plan of its kind."""

    pair: str
    blocks: int
    peer_seconds: float
    is_direct: bool
    runs: int
    direct_first_seconds: float
    direct_all_seconds: float
    direct_once_seconds: float
    chunks: int
    staged_first_seconds: float
    staged_all_seconds: float


class Request:
    """Some blocks of a pair, read anew each time."""

    def __init__(self, pair: Pair, blocks: int, layers: int = LAYERS) -> None:
        self._pair = pair
        # One behind the end, so that its last block is a partial one.
        self._tokens = blocks * pair.local_tokens - 1
        remote_blocks = -(-self._tokens // pair.remote_tokens)
        sizes = CacheSizes(
            layers, remote_blocks + 1, HEADS, pair.remote_tokens, CHANNELS, ITEM_BYTES
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

    @property
    def is_direct(self) -> bool:
        """Which way a worker in host memory takes by itself."""
        return is_direct(self._overlaps[0], self._segments(), HOST_MEMORY)

    def direct(self) -> Planned:
        """The runs of a direct read."""
        start = time.perf_counter()
        copies = [copy for overlap in self._overlaps for copy in overlap.copies]
        plans = plan_parts([(self._segments(), copies)])
        count = len(next(plans))
        first = time.perf_counter() - start
        count += sum(map(len, plans))
        return Planned(count, first, time.perf_counter() - start)

    def staged(self) -> Planned:
        """The chunks of a staged read."""
        start = time.perf_counter()
        chunks = plan_chunks([Share(self._segments(), self._overlaps)], lambda: CHUNK_BYTES)
        next(chunks)
        first = time.perf_counter() - start
        count = 1 + sum(1 for _ in chunks)
        return Planned(count, first, time.perf_counter() - start)


def _regions(planes: Sequence[Plane]) -> list[list[Plane]]:
    """Planes of a layer whose blocks lie inside one another are one region."""
    found: dict[tuple[object, ...], list[Plane]] = {}
    for plane in planes:
        stride = plane.strides_bytes.block
        apart = min(abs(plane.address - other.address) for other in planes if other is not plane)
        alone = () if apart < stride else (plane.content,)
        found.setdefault((plane.layer, *alone), []).append(plane)
    return list(found.values())


def measure(pair: Pair, blocks: int, repeat: int) -> Row:
    """One pair and length."""
    request = Request(pair, blocks)
    direct = [request.direct() for _ in range(repeat)]
    staged = [request.staged() for _ in range(repeat)]

    def middle(found: Sequence[Planned], what: str) -> float:
        return statistics.median(getattr(one, what) for one in found)

    return Row(
        str(pair), blocks, request.peer_seconds, request.is_direct,
        direct[0].count, middle(direct, "first_seconds"), middle(direct, "all_seconds"),
        direct[0].first_seconds,
        staged[0].count, middle(staged, "first_seconds"), middle(staged, "all_seconds"),
    )  # fmt: skip


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table(
        title=f"{LAYERS} layers, {HEADS} heads of {CHANNELS} channels of {ITEM_BYTES} bytes, ms"
    )
    for name in (
        "P -> D", "blocks", "peer", "runs", "direct: first", "once", "all", "chunks",
        "staged: first", "all",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "P -> D" else "right")
    for row in rows:
        marks = ("*", "") if row.is_direct else ("", "*")
        table.add_row(
            row.pair, f"{row.blocks:,}", _ms(row.peer_seconds), f"{row.runs:,}",
            f"{marks[0]}{_ms(row.direct_first_seconds)}", _ms(row.direct_once_seconds),
            _ms(row.direct_all_seconds), f"{row.chunks:,}",
            f"{marks[1]}{_ms(row.staged_first_seconds)}", _ms(row.staged_all_seconds),
        )  # fmt: skip
    console.print(table)


def goals(rows: Sequence[Row]) -> list[Goal]:
    return [
        Goal(
            f"{row.pair}, ms to the first {'runs' if row.is_direct else 'chunk'}",
            1e3 * (row.direct_first_seconds if row.is_direct else row.staged_first_seconds),
            5,
        )
        for row in rows
        if row.blocks == 1000
    ]


def main() -> None:
    """Measures, prints, and judges where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 100, 1000, 4000])
    parser.add_argument("--repeat", type=int, default=9)
    add_options(parser)
    options = parser.parse_args()
    console = console_of(150)
    todo = [(pair, blocks) for pair in PAIRS for blocks in options.blocks]
    rows = [
        measure(pair, blocks, options.repeat)
        for pair, blocks in track(todo, "planning", console=console)
    ]
    show(rows, console)
    conclude(rows, goals(rows), options, console)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


if __name__ == "__main__":
    main()
