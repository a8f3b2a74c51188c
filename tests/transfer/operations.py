"""Counts the operations that a device is asked for, and plans requests of production size."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Memory, Plane
from kvpatch.geometry.segments import BlockList, pair_blocks
from kvpatch.geometry.staged_plan import Chunk, Share, plan_chunks
from kvpatch.transfer.staging_pool import StagingPool
from tests.geometry.whole_caches import CacheSizes, named_layout

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
