"""Blocks whose size a worker reads off the wrong dimension of its cache (0.11.1 and 0.11.2).

There a CPU backend's cache is [2, block, head, token, channel], and the worker takes the
third dimension from the end, its heads, for the tokens of a block. It cuts blocks that
nobody has cut, and states the number to its peers; addresses and bytes are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpatch.connector.local.registered_caches import LayerCache


def takes_heads_for_tokens(worker: Any, layers: Mapping[str, LayerCache]) -> bool:
    """Whether this worker did, and its peers may have; 0.12 asks the worker for its blocks."""
    tokens = {plane.counts.block_tokens for cache in layers.values() for plane in cache.planes}
    planned = worker.vllm_config.cache_config.block_size
    return worker.backend_name == "CPU_ATTN" and tokens == {planned}


def take_planned_blocks(worker: Any) -> None:
    """Has the worker go by the blocks that its ids count, none of which is cut."""
    worker.block_size = worker.vllm_config.cache_config.block_size
    worker._physical_blocks_per_logical_kv_block = 1
