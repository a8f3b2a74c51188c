"""Cross-layer blocks as the release knows caches: a tensor for each layer, over the same memory.

Nobody reads or writes through these tensors: they have the release register what it would of a
cache of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from kvpatch.core.errors import RegistrationRefused
from kvpatch.geometry.cross_layer_blocks import CrossLayerBlocks
from kvpatch.geometry.dimension_order import DimensionOrder
from kvpatch.transfer.one_memory import memory_at
from kvpatch.worker.recurrent_state import StateInPool
from kvpatch.worker.registered_caches import LayerCache
from kvpatch.worker.release_worker import ReleaseWorker

if TYPE_CHECKING:
    import torch


def layer_by_layer_tensors(
    release: ReleaseWorker,
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, LayerCache],
    pool: CrossLayerBlocks,
    inner_layout: str,
    *,
    blocks_outermost: bool = False,
) -> dict[str, torch.Tensor]:
    """The pool's memory as tensors of the release's own shape, a place behind the other.

    Each has a storage of its own, as kvcached's other layouts have. Layers that begin at one
    place of a block do so here too.

    Args:
        blocks_outermost: whether a block's keys and values are together whatever the shape,
            as releases have them beside recurrent state.
    """
    starts = {
        name: pool.address + (layer.planes[0].address - pool.address) * pool.blocks
        for name, layer in layers.items()
    }
    return {
        name: _layer_tensor(
            kv_caches[name],
            layers[name],
            starts[name],
            release.orders(name)[0],
            inner_layout,
            blocks_outermost=blocks_outermost,
        )
        for name in layers
    }


def layer_by_layer_state(
    state: StateInPool, pool: CrossLayerBlocks, parts: int
) -> list[torch.Tensor]:
    """A layer's state over the memory of its place, as :func:`layer_by_layer_tensors` shows it."""
    page_bytes, blocks = pool.layer_bytes[0] * parts, pool.blocks // parts
    start = pool.address + state.place * page_bytes * blocks
    found = []
    for tensor, offset in zip(state.tensors, state.offsets, strict=True):
        item = tensor.element_size()
        flat = _at(tensor, start, page_bytes * blocks // item)
        strides = (page_bytes // item, *tensor.stride()[1:])
        found.append(flat.as_strided(tensor.shape, strides, offset // item))
    return found


def _layer_tensor(
    cache: torch.Tensor,
    layer: LayerCache,
    address: int,
    order: DimensionOrder,
    inner_layout: str,
    *,
    blocks_outermost: bool,
) -> torch.Tensor:
    counts = layer.planes[0].counts
    sizes = {
        "block": counts.blocks,
        "kv": 2,
        "token": counts.block_tokens,
        "head": counts.heads,
        "channel": counts.channels,
        "packed": 2 * counts.channels,
    }
    names = order.dimensions
    if not set(names) <= set(sizes) or order.key_channels is not None:
        raise RegistrationRefused(
            f"this backend's tensors are {names}, which kvcached's contiguous layout does not "
            "stand for",
            "set KVCACHED_CONTIGUOUS_LAYOUT=false",
        )
    # In memory: what is outside a block, then heads and tokens by the layout, then the rest.
    middle = ("token", "head") if inner_layout == "NHD" else ("head", "token")
    fast = [name for name in ("channel", "packed") if name in names]
    slow = [name for name in names if name not in (*middle, *fast)]
    if blocks_outermost:
        slow.sort(key="block".__ne__)
    memory = (*slow, *(name for name in middle if name in names), *fast)
    dense = _at(cache, address, prod(sizes[name] for name in memory))
    return dense.view([sizes[name] for name in memory]).permute(
        [memory.index(name) for name in names]
    )


def _at(like: torch.Tensor, address: int, elements: int) -> torch.Tensor:
    """A flat tensor over memory at an address, of the type and device of another's."""
    return memory_at(address, elements * like.element_size(), like.device).view(like.dtype)
