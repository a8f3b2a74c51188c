"""How the cost of a request grows with its prompt, and of a worker with its peers.

    python experiments/bench_growth.py [--json FILE]

Planning alone, which is what of ours depends on the length: NIXL and the network have their own
costs beside it. A prompt of 1 thousand to 1 million tokens, of 32 layers with 8 heads, in blocks
of 16 tokens, scattered: "first" is from the ids of its blocks to the first chunk or runs that could
be posted, "all" to the last ones, and "MiB" what was held at the peak meanwhile (tracemalloc, which
counts numpy's arrays). A worker plans both in parts, one by one, so that it never holds them
all. "per thousand tokens" is flat where cost is linear.

Peers: what a worker works out once for each peer of another layout, 1 to 64 of them, and keeps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_plan import PAIRS, Request
from rich.console import Console
from rich.progress import track
from rich.table import Table

LENGTHS = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
PEERS = (1, 4, 16, 64)
#: Same layout, larger blocks at P; and another layout.
DIRECT, STAGED = PAIRS[4], PAIRS[5]
LAYERS = 32
_MIB = 1024**2


@dataclass(frozen=True)
class Prompt:
    """One way and length."""

    way: str
    tokens: int
    first_seconds: float
    all_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Peers:
    """So many peers of another layout."""

    peers: int
    seconds: float
    kept_bytes: int


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that it holds at most beyond what was held before."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def staged(tokens: int) -> Prompt:
    """A read through the pool."""
    request = Request(STAGED, tokens // STAGED.local_tokens, LAYERS)
    _, first, last = min((request.staged() for _ in range(3)), key=lambda found: found[2])
    return Prompt("staged", tokens, first, last, peak_of(request.staged))


def direct(tokens: int) -> Prompt:
    """A read that goes straight to its place."""
    request = Request(DIRECT, tokens // DIRECT.local_tokens, LAYERS)
    _, first, last = min((request.direct() for _ in range(3)), key=lambda found: found[2])
    return Prompt("direct", tokens, first, last, peak_of(request.direct))


def peers(count: int) -> Peers:
    """What is worked out when hands are shaken."""
    seconds = sum(Request(STAGED, 16, LAYERS).peer_seconds for _ in range(count))
    tracemalloc.start()
    kept = [Request(STAGED, 16, LAYERS) for _ in range(count)]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return Peers(len(kept), seconds, held)


def tables(prompts: list[Prompt], found: list[Peers]) -> tuple[Table, Table]:
    """By length, and by peers."""
    lengths = Table(title=f"prompts, {LAYERS} layers")
    for name in ("way", "tokens", "first, ms", "all, ms", "ms per thousand tokens", "MiB"):
        lengths.add_column(name, justify="left" if name == "way" else "right")
    for one in prompts:
        lengths.add_row(
            one.way, f"{one.tokens:,}", f"{one.first_seconds * 1e3:.2f}",
            f"{one.all_seconds * 1e3:.1f}", f"{one.all_seconds * 1e6 / one.tokens:.3f}",
            f"{one.peak_bytes / _MIB:.1f}",
        )  # fmt: skip
    many = Table("peers", "ms", "ms a peer", "MiB kept", title="peers of another layout")
    for at in found:
        many.add_row(
            str(at.peers), f"{at.seconds * 1e3:.1f}", f"{at.seconds * 1e3 / at.peers:.2f}",
            f"{at.kept_bytes / _MIB:.1f}",
        )  # fmt: skip
    return lengths, many


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    todo = [(way, tokens) for way in (staged, direct) for tokens in LENGTHS]
    prompts = [
        way(tokens) for way, tokens in track(todo, "planning", console=console, transient=True)
    ]
    found = [peers(count) for count in PEERS]
    for table in tables(prompts, found):
        console.print(table)
    if options.json:
        rows = {"prompts": [asdict(p) for p in prompts], "peers": [asdict(p) for p in found]}
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
