"""What a worker registered, read back from it after the registration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpatch.geometry import KeyOrder, Memory
from kvpatch.vllm.caches import LayerCache
from kvpatch.vllm.peers import OurSide


def our_side(worker: Any, layers: Mapping[str, LayerCache], key_order: KeyOrder) -> OurSide:
    """Facts that every generation has, under the names that it gives them."""
    addresses = worker.kv_caches_base_addr[worker.engine_id]
    if isinstance(addresses, Mapping):  # by rank, from 0.14
        addresses = addresses[worker.tp_rank]
    block_bytes = getattr(worker, "block_len_per_layer", None)  # from 0.11
    if block_bytes is None:
        block_bytes = [worker.block_len] * len(addresses)
    inner_layout = inner_layout_of(layers)
    device_id = getattr(worker, "device_id", worker.tp_rank)  # the rank up to 0.11.0
    return OurSide(
        layers=layers,
        addresses=tuple(addresses),
        block_bytes=tuple(block_bytes),
        block_tokens=int(worker.block_size),
        kernel_blocks_per_block=int(getattr(worker, "_physical_blocks_per_logical_kv_block", 1)),
        layout=getattr(worker, "kv_cache_layout", inner_layout),  # from 0.10.1
        inner_layout=inner_layout,
        total_heads=int(worker.model_config.get_total_num_kv_heads()),
        tp_rank=int(worker.tp_rank),
        tp_size=int(worker.world_size),
        memory=Memory(getattr(worker, "nixl_memory_type", "VRAM"), device_id),  # from 0.10.1
        backend=str(worker.backend_name),
        key_order=key_order,
        region_names=tuple(getattr(worker, "region_names", ())) or None,  # from 0.30
    )


def inner_layout_of(layers: Mapping[str, LayerCache]) -> str:
    """HND or NHD, by the strides: in NHD the heads of a token are neighbours."""
    for layer in layers.values():
        plane = layer.planes[0]
        if plane.counts.heads > 1 and plane.counts.block_tokens > 1:
            strides = plane.strides_bytes
            return "NHD" if strides.token > strides.head else "HND"
    return "HND"  # with one head, or blocks of one token, the two are the same bytes
