"""As many blocks are registered as the tensors have.

Why:
    An elastic allocator hands out tensors with more blocks than were planned
    (kvcached sizes them by virtual memory). From 0.18 on the connector registers
    the planned number: a tensor ``[4096, 2, 16, 8, 128]`` for a plan of 1024 is
    refused by an assertion, and from 0.29 on one with exactly twice the blocks is
    quietly taken for two regions.
Where:
    The worker, on P and on D.
How:
    Every attention layer's tensor is read before anything is registered. If all
    agree on a number of blocks, the worker's plan is set to it, on that worker
    alone. Tensors that disagree, overlap themselves, have no blocks or are of no
    known shape are refused.
Upstream:
    kvcached #311 and #312; vLLM has the assertion, and no issue of its own.
Remove when:
    The connector counts blocks in the tensors again, as it did up to 0.17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvpatch.core import seams, settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.ledger import Patch, Site, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.vllm.caches import LayerCache, read_layers
from kvpatch.vllm.kvcached_pools import check_pools, kvcacheds_settings
from kvpatch.vllm.registration import Registration, registration_of
from kvpatch.vllm.state import worker_state


def _register_kv_caches(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    registration: Registration,
) -> Any:
    def register(kv_caches: Mapping[str, Any]) -> Any:
        layers = read_layers(registration, instance, kv_caches)
        kernel_blocks = registration.kernel_blocks_per_block(instance) or 1
        planned = registration.planned_blocks(instance)
        if layers and not is_as_planned(layers, planned, kernel_blocks):
            if settings.is_kvcached_enabled() and not worker_state(instance).is_host_buffered:
                # Says more than the counts below can; a host buffer's tensors are not kvcached's.
                check_pools(kv_caches, layers, kvcacheds_settings())
            registration.set_blocks(instance, common_blocks(layers, kernel_blocks))
        return wrapped(kv_caches)

    return register(*args, **kwargs)


def is_as_planned(
    layers: Mapping[str, LayerCache], planned: int | None, kernel_blocks_per_block: int
) -> bool:
    """Whether every tensor has the planned blocks, counted as logical or as kernel blocks.

    The hybrid allocator hands out some of each where the two differ in size.
    """
    if planned is None:
        return False
    return {c.blocks for c in layers.values()} <= {planned, planned * kernel_blocks_per_block}


def common_blocks(layers: Mapping[str, LayerCache], kernel_blocks_per_block: int) -> int:
    """The number of logical blocks that every layer's tensor has.

    Raises:
        RegistrationRefused: they disagree, or a tensor ends in the middle of a
            logical block; every layer's count is in the message.
    """
    kernel_blocks = {layer: cache.blocks for layer, cache in layers.items()}
    counts = set(kernel_blocks.values())
    if len(counts) > 1 or max(counts) % kernel_blocks_per_block:
        listed = ", ".join(f"{layer}: {count}" for layer, count in kernel_blocks.items())
        raise RegistrationRefused(
            "all layers need one number of KV cache blocks, a multiple of "
            f"{kernel_blocks_per_block} (kernel blocks in a block), and have {listed}: make the "
            "allocator hand out tensors of one size"
        )
    return counts.pop() // kernel_blocks_per_block


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    registration = registration_of(facts)
    return {
        seams.register_kv_caches(facts): partial(_register_kv_caches, registration=registration)
    }


PATCH = Patch(slug="block_count", wire_affecting=True, sites=_sites, document=__doc__)
