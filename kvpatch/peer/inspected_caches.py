"""Reads the tensors that a worker is handed, before the release registers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import LAYER_BY_LAYER
from kvpatch.peer.block_shapes import heads_of, tokens_of
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.recurrent_state import StatePages, pages_of
from kvpatch.worker.registered_caches import DeviceCaches, LayerCache, differ_in_shape, read_layers
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state
from kvpatch.worker.state_division import division_of
from kvpatch.worker.vllm_bugs import refuse_steps_under_way

#: All layers, the groups that they are in, and how keys lie in a block.
Cache = tuple[dict[str, LayerCache], tuple[Group, ...], KeyOrder]


@dataclass(frozen=True)
class InspectedCaches:
    """The caches that a worker is about to register.

    Attributes:
        cache: the layers, groups and key order; None where kvpatch cannot read into them.
        behind: the same of the device's tensors, where those to register are a host buffer's.
        states: the pages of the layers with recurrent state.
        blocks_hold_both: True if the backend's own blocks hold keys, and then values, in rows.
    """

    cache: Cache | None
    behind: Cache | None
    states: Mapping[str, StatePages]
    blocks_hold_both: bool


def inspect(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> InspectedCaches:
    """Reads what a worker is handed, before registering it shows split tensors otherwise."""
    refuse_steps_under_way(release)
    cache = read_cache(release, kv_caches, leave_state=True)
    device = worker_state(release.worker).held(DeviceCaches)
    states: Mapping[str, StatePages] = {}
    if cache is not None and len(cache[0]) < len(kv_caches):
        states = read_states(release, kv_caches, cache)
        cache = cache if states and device is None else None
    behind = cache if device is None else read_cache(release, device.tensors)
    has_both = False
    if cache is not None and cache[2] is KeyOrder.ROW_MAJOR:
        orders = [release.orders(layer)[0].dimensions for layer in cache[0]]
        has_both = all(dimensions[:2] == ("block", "kv") for dimensions in orders)
    return InspectedCaches(cache, behind, states, has_both)


def read_states(
    release: ReleaseWorker, kv_caches: Mapping[str, Any], cache: Cache
) -> dict[str, StatePages]:
    """Returns the pages of all layers but those of `cache`; none where one is no such page."""
    layers, _, _ = cache
    for layer in layers.values():
        starts = [plane.address for plane in layer.planes]
        if max(starts) - min(starts) >= layer.planes[0].strides_bytes.block:
            return {}  # a block does not end before the next one begins, as states have it
    found = {}
    for name in sorted(kv_caches.keys() - layers.keys()):
        spec = release.spec_of(name)
        pages = pages_of(kv_caches[name], spec) if hasattr(spec, "shapes") else None
        if pages is None:
            return {}
        found[name] = replace(pages, division=division_of(release, spec))
    return found


def are_in_regions(release: ReleaseWorker, states: Mapping[str, StatePages]) -> bool:
    """True if a peer's pages follow from its regions: each layer's begin where a region does."""
    addresses = release.addresses
    is_by_layer = release.stated_layout in LAYER_BY_LAYER
    return is_by_layer and all(pages.address in addresses for pages in states.values())


def is_plain(release: ReleaseWorker) -> bool:
    """True if reads go straight to the registered cache, all tokens of it.

    False with a host buffer of the release's, memory of two kinds, or context parallelism: there
    the release's own rules hold.
    """
    return not (
        release.has_own_mirror
        or (release.facts.names_regions and release.worker._mixed_mem_types)
        or max(release.context_sizes, default=1) > 1
    )


def has_blocks_of(block_tokens: int, cache: Cache) -> bool:
    """True if every tensor's blocks are the ones that the worker will name.

    The hybrid allocator may hand out logical blocks where kernel blocks are meant. Groups of
    several shapes have blocks of unlike tokens, of which the worker names the fewest, or from
    0.30 on their least common multiple.
    """
    layers, groups, _ = cache
    found = [tokens_of(layers, group.layers & layers.keys()) for group in groups]
    if any(len(tokens) > 1 for tokens in found):
        return False
    every = set[int]().union(*found)
    if differ_in_shape(layers):
        return block_tokens in (min(every), lcm(*every))
    return every == {block_tokens}


def read_cache(
    release: ReleaseWorker, kv_caches: Mapping[str, Any], *, leave_state: bool = False
) -> Cache | None:
    """Reads all layers; None where one cannot be read, so that peers are left to the release.

    Args:
        leave_state: True if layers that are no attention may be left out.
    """
    worker, key_order = release.worker, release.key_order()
    if key_order is None:
        return None
    total_heads = worker.model_config.get_total_num_kv_heads()
    first_head, _ = heads_of(total_heads, worker.tp_rank, worker.world_size)
    layers = read_layers(release, kv_caches, key_order, first_head)
    if not layers or (len(layers) < len(kv_caches) and not leave_state):
        return None
    return layers, release.groups(layers), key_order
