"""How many operations a device is asked for, to place what a request has read.

    python experiments/bench_operations.py [--blocks 1000] [--layers 80] [--json FILE] [--check]

What an operation costs a device's thread is its launch, about 10 us, whatever it copies. Plans
are a worker's own, and what places their chunks is what does so on a GPU; its tensors are torch's
"meta" tensors, which have shapes and no bytes, so that a request of production size is counted on
any machine. Views are no operations. "alone" is each layer placed by itself, as it is where
allocations are not one range of memory. Layers lie evenly apart, as an allocator that is asked for
equal sizes in a row has them. With --check the exit status is 1 above 4 operations a chunk.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvpatch.geometry.merged_placements import merged
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList, pair_blocks
from kvpatch.geometry.staged_plan import Chunk, Placement, Share, plan_chunks
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.place import place_on_device
from kvpatch.transfer.staging_pool import StagingPool
from tests.geometry.whole_caches import CacheSizes, named_layout

MOST = 4
_GPU = Memory("VRAM")
_POOL_BYTES = 256 * 1024**2
_LOCAL_ADDRESS = 1 << 32
_HEADS, _CHANNELS, _ITEM_BYTES = 8, 128, 2
#: (P's layout, tokens of its block, D's layout, tokens of its block)
PAIRS = (
    ("LBHNC", 128, "LBHNC", 32),
    ("LBHNC", 32, "LBHNC", 128),
    ("LBNHC", 16, "LBHNC", 16),
    ("LBHNC", 16, "LBNHC", 16),
    ("CPU_packed", 128, "CPU_packed", 32),
)


@dataclass(frozen=True)
class Counted:
    """One pair and length of a prompt."""

    pair: str
    tokens: int
    chunks: int
    operations: int
    operations_alone: int

    @property
    def operations_a_chunk(self) -> float:
        """Together."""
        return self.operations / self.chunks


class Operations(TorchDispatchMode):  # type: ignore[misc] # torch has no types here
    """Counts what is asked of a device inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def operations_of(placements: Sequence[Placement], staging_bytes: int, cache: Bytes) -> int:
    """What placing them asks of a device."""
    staging = torch.empty(staging_bytes, dtype=torch.uint8, device="meta")
    with Operations() as counted:
        place_on_device(staging, [(cache, placement) for placement in placements])
    return counted.count


def chunks_of(pair: tuple[str, int, str, int], layers: int, tokens: int) -> tuple[list[Chunk], int]:
    """The chunks of a prompt in scattered blocks, and the bytes of D's cache."""
    remote_layout, remote_tokens, local_layout, local_tokens = pair
    remote_blocks, local_blocks = -(-tokens // remote_tokens), -(-tokens // local_tokens)
    sizes = CacheSizes(layers, remote_blocks, _HEADS, remote_tokens, _CHANNELS, _ITEM_BYTES)
    remote = named_layout(remote_layout).planes(sizes, 1 << 44, _GPU)
    sizes = CacheSizes(layers, local_blocks, _HEADS, local_tokens, _CHANNELS, _ITEM_BYTES)
    local = named_layout(local_layout).planes(sizes, _LOCAL_ADDRESS, _GPU)
    regions: dict[str, list[Plane]] = {}
    for plane in remote:
        regions.setdefault(plane.layer, []).append(plane)
    order = np.random.default_rng(0).permutation
    segments = pair_blocks(
        BlockList(order(remote_blocks), remote_tokens),
        BlockList(order(local_blocks), local_tokens),
        0,
        tokens,
    )
    pool = StagingPool(_POOL_BYTES, _no_memory, on_device=True)
    shares = [Share(segments, overlaps_of(list(regions.values()), local))]
    return list(plan_chunks(shares, pool.chunk_bytes)), sizes.total_bytes()


def _no_memory(size_bytes: int) -> torch.Tensor:
    raise RuntimeError(f"{size_bytes} bytes of a pool were asked for, and nothing is read here")


def count(pair: tuple[str, int, str, int], layers: int, tokens: int) -> Counted:
    """One row."""
    chunks, size_bytes = chunks_of(pair, layers, tokens)
    cache = Bytes(_LOCAL_ADDRESS, torch.empty(size_bytes, dtype=torch.uint8, device="meta"))
    together, alone = (
        sum(operations_of(way(chunk.placements), chunk.buffer_bytes, cache) for chunk in chunks)
        for way in (merged, list)
    )
    name = f"{pair[0]} {pair[1]} -> {pair[2]} {pair[3]}"
    return Counted(name, tokens, len(chunks), together, alone)


def main() -> int:
    """Counts, prints, and says whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1000, help="of 16 tokens, the long prompts")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {MOST} a chunk")
    options = parser.parse_args()
    lengths = (100, 1000, options.blocks * 16 - 1)
    todo = [(pair, tokens) for pair in PAIRS for tokens in lengths]
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = [
        count(pair, options.layers, tokens)
        for pair, tokens in track(todo, "counting", console=console, transient=True)
    ]
    table = Table(title=f"{options.layers} layers, {_HEADS} heads of {_CHANNELS} channels")
    for name in ("P -> D", "tokens", "chunks", "operations", "a chunk", "alone", "a chunk"):
        table.add_column(name, justify="left" if name == "P -> D" else "right")
    for row in rows:
        table.add_row(
            row.pair, f"{row.tokens:,}", f"{row.chunks:,}",
            f"{row.operations:,}", f"{row.operations_a_chunk:.1f}",
            f"{row.operations_alone:,}", f"{row.operations_alone / row.chunks:.1f}",
        )  # fmt: skip
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    over = [row for row in rows if math.ceil(row.operations_a_chunk) > MOST]
    for row in over:
        console.print(f"{row.pair}, {row.tokens:,} tokens: more than {MOST} operations a chunk")
    return int(bool(over) and options.check)


if __name__ == "__main__":
    sys.exit(main())
