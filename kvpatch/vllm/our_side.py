"""What a worker registered, read back from it after the registration."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from kvpatch.geometry import (
    LAYER_BY_LAYER,
    LAYERS_INSIDE_BLOCKS,
    NAMED_LAYOUTS,
    InnerLayout,
    KeyOrder,
    Memory,
    layer_by_layer,
)
from kvpatch.vllm.caches import LayerCache
from kvpatch.vllm.groups import packed_groups
from kvpatch.vllm.remote_geometry import OurSide
from kvpatch.vllm.unstated import kernel_sizes

_LOG = logging.getLogger("kvpatch.registration")


def our_side(worker: Any, layers: Mapping[str, LayerCache], key_order: KeyOrder) -> OurSide:
    """Facts that every generation has, under the names that it gives them."""
    addresses = registered_addresses(worker)
    block_bytes = getattr(worker, "block_len_per_layer", None)  # from 0.11
    if block_bytes is None:
        block_bytes = [worker.block_len] * len(addresses)
    inner_layout = inner_layout_of(layers)
    layout = getattr(worker, "kv_cache_layout", inner_layout)  # from 0.10.1
    device_id = getattr(worker, "device_id", worker.tp_rank)  # the rank up to 0.11.0
    units = units_of(layers) if layout in NAMED_LAYOUTS else None
    return OurSide(
        layers=layers,
        addresses=addresses,
        block_bytes=tuple(block_bytes),
        block_tokens=int(worker.block_size),
        kernel_blocks_per_block=int(getattr(worker, "_physical_blocks_per_logical_kv_block", 1)),
        layout=layout,
        inner_layout=inner_layout,
        total_heads=int(worker.model_config.get_total_num_kv_heads()),
        tp_rank=int(worker.tp_rank),
        tp_size=int(worker.world_size),
        memory=Memory(getattr(worker, "nixl_memory_type", "VRAM"), device_id),  # from 0.10.1
        backend=str(worker.backend_name),
        key_order=key_order,
        region_names=tuple(getattr(worker, "region_names", ())) or None,  # from 0.30
        units=units,
        row_groups=None if units is None else row_groups_of(worker, layers, layout),
        kernel_sizes=kernel_sizes(worker),
    )


def registered_addresses(worker: Any) -> tuple[int, ...]:
    """Where each region of a worker starts."""
    addresses = worker.kv_caches_base_addr[worker.engine_id]
    if isinstance(addresses, Mapping):  # by rank, from 0.14
        addresses = addresses[worker.tp_rank]
    return tuple(addresses)


def units_of(layers: Mapping[str, LayerCache]) -> tuple[tuple[str, ...], ...] | None:
    """The layers of each tensor; None where keys and values are not in one row."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        if "kv" in layer.order.dimensions:
            return None
        found[layer.planes[0].address].append(name)
    return tuple(tuple(names) for names in found.values())


def row_groups_of(
    worker: Any, layers: Mapping[str, LayerCache], layout: str
) -> tuple[tuple[str, ...], ...] | None:
    """Each group's layers as the release's plan lets them follow one another in a row.

    None where that is not known. The plan is made of the model and the same on both sides,
    whatever the layout, where all pages have one size: a tensor of it places its layers one
    after the other behind those of the one before, and groups overlay one another. Where our
    own layers lie in rows, they must lie in that order.
    """
    found = packed_groups(worker)
    if found is None:
        return None
    with_layers = tuple(group for group in found if not layers.keys().isdisjoint(group))
    if sorted(name for group in with_layers for name in group) != sorted(layers):
        return None
    for group in with_layers:
        starts = [layers[name].planes[0].address for name in group]
        if layout in LAYERS_INSIDE_BLOCKS and starts != sorted(starts):
            return None
    return with_layers


#: What the handshake says of a worker's regions (from 0.30), by the worker's name for it.
_STATED = {
    "region_names": "region_names",
    "region_group_ids": "region_group_ids",
    "region_members": "region_members",
    "packed_member_layouts": "_packed_member_layouts",
}


def own_regions(worker: Any) -> dict[str, Any]:
    """What this worker states of its own regions, copied; empty to 0.29."""
    found = {field: getattr(worker, name, None) for field, name in _STATED.items()}
    return {field: copy.copy(value) for field, value in found.items() if value is not None}


def inner_layout_of(layers: Mapping[str, LayerCache]) -> str:
    """HND or NHD, by the strides; HND where the two are the same bytes."""
    return layout_shown_by(layers) or "HND"


def layout_shown_by(layers: Mapping[str, LayerCache]) -> InnerLayout | None:
    """HND or NHD, by the strides: in NHD the heads of a token are neighbours.

    None with one head, or blocks of one token: the two are the same bytes then.
    """
    for layer in layers.values():
        plane = layer.planes[0]
        if plane.counts.heads > 1 and plane.counts.block_tokens > 1:
            strides = plane.strides_bytes
            return "NHD" if strides.token > strides.head else "HND"
    return None


def call_layout_by_its_strides(worker: Any, layers: Mapping[str, LayerCache]) -> None:
    """Has the worker state the layout that its tensors have, where it believes in another.

    An allocator may hand out NHD where the release planned HND; a peer of other blocks
    would read heads for tokens. One of a backend that has one layout knows what it states, as the
    release does, which compares the names.
    """
    if any(layer.has_heads_by_turns for layer in layers.values()):
        return
    stated = getattr(worker, "kv_cache_layout", None)  # from 0.10.1
    shown = layout_shown_by(layers)
    if stated is None or shown is None:
        return
    found = layer_by_layer(shown, like=stated)
    if stated in LAYER_BY_LAYER and stated != found:
        _LOG.info("tensors said to be %s are %s, and peers are told so", stated, found)
        worker.kv_cache_layout = found
