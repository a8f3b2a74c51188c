"""How long a plan takes, against the number of blocks: python experiments/bench_plan.py

Milliseconds: the first plan of its kind, then the median of repeated ones. What the first
costs more is mostly memory that the allocator gets for the first time; above some millions
of runs it hands it back each time, and the median shows it too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace

import numpy as np

from kvpatch.geometry import (
    BlockList,
    CacheSizes,
    Memory,
    Plan,
    named_layout,
    pair_blocks,
    plan_copy,
    uncovered_tail,
)

LAYERS = 32
HEADS = 8
CHANNELS = 128
ITEM_BYTES = 2
MEMORY = Memory("VRAM")


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


def plan(pair: Pair, blocks: int) -> tuple[Plan, float]:
    """The plan for that many local blocks of tokens, and the seconds that it took."""
    tokens = blocks * pair.local_tokens
    remote_blocks = -(-tokens // pair.remote_tokens)
    sizes = CacheSizes(LAYERS, remote_blocks + 1, HEADS, pair.remote_tokens, CHANNELS, ITEM_BYTES)
    remote = named_layout(pair.remote_layout).planes(sizes, 1 << 32, MEMORY)
    sizes = replace(sizes, blocks=blocks + 1, block_tokens=pair.local_tokens)
    local = named_layout(pair.local_layout).planes(sizes, 1 << 44, MEMORY)
    order = np.random.default_rng(0).permutation if pair.scattered else np.arange
    remote_ids, local_ids = order(remote_blocks), order(blocks)
    start = time.perf_counter()
    theirs = BlockList(remote_ids, pair.remote_tokens)
    ours = BlockList(local_ids, pair.local_tokens)
    segments = pair_blocks(theirs, ours, 0, tokens - 1)
    result = plan_copy(segments, remote, local, uncovered_tail(ours, tokens - 1))
    return result, time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 100, 1000, 4000])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--most-runs", type=int, default=20_000_000, help="skip larger plans")
    options = parser.parse_args()
    print(f"{LAYERS} layers, {HEADS} heads of {CHANNELS} channels of {ITEM_BYTES} bytes")
    print(f"{'pair':<48} {'blocks':>7} {'runs':>10} {'first':>9} {'median':>9} {'ns/run':>8}")
    for pair in PAIRS:
        per_block = 0.0
        for blocks in options.blocks:
            if per_block * blocks > options.most_runs:
                continue
            timed = [plan(pair, blocks) for _ in range(options.repeat)]
            runs = len(timed[0][0])
            per_block = runs / blocks
            seconds = statistics.median(seconds for _, seconds in timed)
            print(
                f"{pair!s:<48} {blocks:>7} {runs:>10} {timed[0][1] * 1e3:>9.2f} "
                f"{seconds * 1e3:>9.2f} {seconds / runs * 1e9:>8.0f}"
            )


if __name__ == "__main__":
    main()
