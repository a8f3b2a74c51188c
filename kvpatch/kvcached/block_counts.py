"""How many blocks are registered: as many as the tensors have, whatever was planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.kvcached.pools import check_pools, kvcacheds_settings
from kvpatch.worker.registered_caches import LayerCache, is_as_planned, read_layers
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state


def count_blocks(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> None:
    """Has a worker plan as many blocks as its tensors have.

    Raises:
        RegistrationRefused: the tensors disagree.
    """
    layers = read_layers(release, kv_caches)
    kernel_blocks = release.planned_kernel_blocks or 1
    if not layers or is_as_planned(layers, release.planned_blocks, kernel_blocks):
        return
    if settings.is_kvcached_enabled() and not worker_state(release.worker).is_host_buffered:
        # Says more than the counts below can; a host buffer's tensors are not kvcached's.
        check_pools(kv_caches, layers, kvcacheds_settings())
    release.set_blocks(common_blocks(layers, kernel_blocks))


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
            f"{kernel_blocks_per_block} (kernel blocks in a block), and have {listed}",
            "make the allocator hand out tensors of one size",
        )
    return counts.pop() // kernel_blocks_per_block
