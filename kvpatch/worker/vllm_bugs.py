"""The bugs of vLLM in caches that it lays out itself.

**Blocks of a wrong size** (0.11.1 and 0.11.2). A CPU backend's cache is [2, block, head, token,
channel]. The worker takes the third dimension from the end, its heads, for the tokens of a block.
It then cuts blocks that no kernel has cut, and states the number to its peers. Addresses and bytes
are right.

**Recurrent state between the layers of a block** (from 0.29, BLNHC and BLHNC). The release steps
from block to block of a state by the state's own page. But a block of all layers lies between the
two, so that it sends other layers' bytes, without an error. The step is right only where attention
of another group begins in the same place and is registered first.

**Recurrent state beside steps that are under way** (<= 0.25, vLLM #37285, #45357 and #48481). Under
asynchronous scheduling a step begins before the one before it is over. When P's bytes are there
already, a load's blocks are then zeroed, or a request that has ended writes to them (<= 0.23). A
CPU runs one step after the other.

**AMX tiles that the process may not use yet** (CPU, bfloat16, a processor with AMX; seen on
0.32.0). Linux lets a process use AMX only after it has asked. The CPU backend does not ask; PyTorch
does before its first large matrix product. A worker whose first request is a load has computed
none, so that its attention ends it with SIGILL.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from kvpatch.core.errors import RegistrationRefused
from kvpatch.geometry.cross_layer_blocks import in_order
from kvpatch.geometry.layout_strides import LAYERS_INSIDE_BLOCKS
from kvpatch.worker.registered_caches import LayerCache
from kvpatch.worker.release_worker import ReleaseWorker

_LOG = logging.getLogger("kvpatch.unlike_engines")


def takes_heads_for_tokens(worker: Any, layers: Mapping[str, LayerCache]) -> bool:
    """True if this worker did, and its peers may have; 0.12 asks the worker for its blocks."""
    tokens = {plane.counts.block_tokens for cache in layers.values() for plane in cache.planes}
    planned = worker.vllm_config.cache_config.block_size
    return worker.backend_name == "CPU_ATTN" and tokens == {planned}


def take_planned_blocks(worker: Any) -> None:
    """Sets the worker's block size to that of the blocks that ids count: none of them is cut."""
    worker.block_size = worker.vllm_config.cache_config.block_size
    worker._physical_blocks_per_logical_kv_block = 1


def may_use_amx() -> bool:
    """Asks Linux to let this process use AMX; True if it may. A second call changes nothing.

    vLLM's CPU backend uses AMX and does not ask for it.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)  # a private name: what a PyTorch has not asks none
    return ask is not None and bool(ask())


def ask_for_tiles() -> None:
    """Asks for AMX before attention uses it."""
    if not may_use_amx():
        _LOG.warning(
            "this process may not use AMX, with which vLLM computes attention here: it may end "
            "with SIGILL; use --dtype float32"
        )


def refuse_steps_under_way(release: ReleaseWorker) -> None:
    """Refuses a D whose steps may write to what it loads."""
    from vllm.platforms import current_platform

    facts, config = release.facts, release.worker.vllm_config
    if not facts.has_cache_groups or facts.spares_loaded_blocks:
        return
    is_ahead = config.scheduler_config.async_scheduling and config.kv_transfer_config.is_kv_consumer
    if not is_ahead or current_platform.device_type == "cpu":
        return
    if any(hasattr(release.spec_of(layer), "shapes") for layer in release.worker._layer_specs):
        raise RegistrationRefused(
            "this model has recurrent state, and under asynchronous scheduling a step that is "
            "under way writes to blocks that are loaded (vLLM #45357, #48481)",
            "use --no-async-scheduling, or vLLM 0.26 or later; a P alone may have kv_role "
            "kv_producer",
        )


def misread_states(
    release: ReleaseWorker, kv_caches: Mapping[str, Any], attention: Collection[str]
) -> bool:
    """True if the release would look elsewhere for the state of a layer that is no attention."""
    if release.stated_layout not in LAYERS_INSIDE_BLOCKS:
        return False
    if release.worker._is_csa_linear:  # a kind of its own, by its strides
        return False
    specs = release.worker._layer_specs
    return any(
        _is_misread(name, kv_caches, attention, int(specs[name].page_size_bytes))
        for name in kv_caches.keys() - frozenset(attention)
        if type(specs.get(name)).__name__ == "MambaSpec"
    )


def _is_misread(
    name: str, kv_caches: Mapping[str, Any], attention: Collection[str], page_bytes: int
) -> bool:
    cache = kv_caches[name]
    if cache.stride(0) * cache.element_size() == page_bytes:
        return False
    return not all(
        first in attention and kv_caches[first][0].is_contiguous()
        for first in (
            next(other for other in order if kv_caches[other].data_ptr() == cache.data_ptr())
            for order in (kv_caches, in_order(kv_caches))  # 0.29's, and later ones'
        )
    )
