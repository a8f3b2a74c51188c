"""This worker's cache as reads from unlike peers fill it, and the reader that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from typing import Any

from kvpatch.core import settings
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry import LAYER_BY_LAYER, KeyOrder, places_of
from kvpatch.vllm.backend_layouts import backend_layouts
from kvpatch.vllm.caches import LayerCache, read_layers
from kvpatch.vllm.cross_layer_blocks import RegisteredRows
from kvpatch.vllm.groups import Group
from kvpatch.vllm.halves import halves_of
from kvpatch.vllm.head_shares import SharesRead
from kvpatch.vllm.local_geometry import LocalGeometry, local_geometry_of, registered_addresses
from kvpatch.vllm.peer_states import places_of_states
from kvpatch.vllm.reader import Reader
from kvpatch.vllm.registration import Registration
from kvpatch.vllm.row_form import places_digest
from kvpatch.vllm.shapes import are_unlike, heads_of, tokens_of
from kvpatch.vllm.staging import staging_pool
from kvpatch.vllm.state import worker_state
from kvpatch.vllm.states import StatePages, pages_of, states_digest

#: All layers, the groups that they are in, and how keys lie in a block.
Cache = tuple[dict[str, LayerCache], tuple[Group, ...], KeyOrder]


def reader_for(
    worker: Any,
    agent: Any,
    kv_caches: Mapping[str, Any],
    cache: Cache,
    behind: Mapping[str, LayerCache],
    *,
    blocks_hold_both: bool = False,
    facts: ReleaseFacts,
    misreads_blocks: bool,
    states: Mapping[str, StatePages],
) -> Reader:
    """The reader of what a worker has registered, or of the device's cache behind it.

    Args:
        behind: the device's layers where what is registered is a host buffer; else the same.
        blocks_hold_both: of :func:`has_both_in_blocks`.
        misreads_blocks: whether block sizes that peers state are none.
        states: the pages of the layers with recurrent state.
    """
    layers, groups, key_order = cache
    state = worker_state(worker)
    buffer, rows = state.host_buffer, state.rows
    ours = local_geometry_of(worker, layers if rows is None else rows.shown, key_order)
    if blocks_hold_both:
        ours = replace(ours, halves=halves_of(ours))
    known = backend_layouts(worker)
    ours = replace(
        ours,
        meets_one_rank=facts.meets_one_rank,
        shares_read=SharesRead(facts.counts_one_head, facts.reads_its_share),
        misreads_blocks=misreads_blocks,
        planned_layout=state.planned_layout,
        backend_layout=next(iter(known)) if len(known) == 1 else None,
    )
    if len(groups) > 1:
        ours = replace(ours, groups=tuple(group.layers for group in groups))
    if states:
        ours = _with_states(worker, ours, states, rows)
    device = kv_caches[next(iter(layers))].device
    heard = state.announcements
    if buffer is None:
        pool = staging_pool(agent, ours.memory, device)
        mode = settings.transfer_mode()
        if rows is not None:
            return Reader(
                ours,
                groups,
                kv_caches,
                pool,
                mode,
                layers,
                rows,
                states=states,
                announcements=heard,
            )
        return Reader(ours, groups, kv_caches, pool, mode, states=states, announcements=heard)
    caches = buffer.caches
    copied_to = next(iter(buffer.tensors.values())).device if caches is None else caches.device
    pool = staging_pool(agent, ours.memory, device, copied_to=copied_to)
    return Reader(
        ours, groups, buffer.tensors, pool, "staged", behind, caches=caches, announcements=heard
    )


def _with_states(
    worker: Any, ours: LocalGeometry, states: Mapping[str, StatePages], rows: RegisteredRows | None
) -> LocalGeometry:
    """Our side with its states' pages as the release was shown them."""
    if rows is None:
        ours = replace(ours, states=states)
        groups = ours.groups or (frozenset(ours.layers),)
        places = places_digest(places_of([group & ours.layers.keys() for group in groups]))
        told = states_digest(places, places_of_states(ours), worker._layer_specs)
        return replace(ours, row_places=told)
    shown = {}
    for name, state in rows.states.items():
        blocks = states[name].blocks
        page_bytes = rows.row.block_bytes * rows.row.blocks // (len(rows.row.layers) * blocks)
        address = rows.row.address + state.place * page_bytes * blocks
        shown[name] = replace(states[name], address=address, stride_bytes=page_bytes)
    return replace(ours, states=shown, row_places=rows.form.places)


def read_states(worker: Any, kv_caches: Mapping[str, Any], cache: Cache) -> dict[str, StatePages]:
    """The pages of all layers that are no attention; none where one is no such page.

    Args:
        cache: the attention layers among `kv_caches`.
    """
    layers, _, _ = cache
    if not all(map(_is_a_page, layers.values())):
        return {}
    found = {}
    specs = getattr(worker, "_layer_specs", {})  # from 0.18
    for name in sorted(kv_caches.keys() - layers.keys()):
        spec = specs.get(name)
        pages = pages_of(kv_caches[name], spec) if hasattr(spec, "shapes") else None
        if pages is None:
            return {}
        found[name] = pages
    return found


def are_in_regions(worker: Any, states: Mapping[str, StatePages]) -> bool:
    """Whether a peer's pages follow from its regions: each layer's begin where a region does."""
    addresses = registered_addresses(worker)
    is_by_layer = worker.kv_cache_layout in LAYER_BY_LAYER
    return is_by_layer and all(pages.address in addresses for pages in states.values())


def _is_a_page(layer: LayerCache) -> bool:
    """Whether all of a block lies before the next one begins, as states have it."""
    starts = [plane.address for plane in layer.planes]
    return max(starts) - min(starts) < layer.planes[0].strides_bytes.block


def is_plain(worker: Any) -> bool:
    """Whether reads go straight to the registered cache, all tokens of it.

    Not through a host buffer, to memory of two kinds, or to a share of the tokens
    (context parallelism): there the release's own rules hold.
    """
    parallel = worker.vllm_config.parallel_config
    return not (
        getattr(worker, "use_host_buffer", False)  # from 0.10.1
        or getattr(worker, "_mixed_mem_types", False)  # from 0.30
        or getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    )


def has_blocks_of(block_tokens: int, cache: Cache) -> bool:
    """Whether every tensor's blocks are the ones that the worker will name.

    The hybrid allocator may hand out logical blocks where kernel blocks are meant. Groups of
    several shapes have blocks of unlike tokens, of which the worker names the fewest, or from
    0.30 on their least common multiple.
    """
    layers, groups, _ = cache
    found = [tokens_of(layers, group.layers & layers.keys()) for group in groups]
    if any(len(tokens) > 1 for tokens in found):
        return False
    every = set[int]().union(*found)
    if are_unlike(layers):
        return block_tokens in (min(every), lcm(*every))
    return every == {block_tokens}


def read_cache(
    registration: Registration,
    worker: Any,
    kv_caches: Mapping[str, Any],
    *,
    leave_state: bool = False,
) -> Cache | None:
    """All layers, where copies need every byte named; None where one cannot be.

    Peers are then left to the release, which refuses the ones it cannot read.

    Args:
        leave_state: whether layers that are no attention may be left out.
    """
    key_order = registration.key_order(worker)
    if key_order is None:
        return None
    total_heads = worker.model_config.get_total_num_kv_heads()
    first_head, _ = heads_of(total_heads, worker.tp_rank, worker.world_size)
    layers = read_layers(registration, worker, kv_caches, key_order, first_head)
    if not layers or (len(layers) < len(kv_caches) and not leave_state):
        return None
    return layers, registration.groups(worker, layers), key_order


def has_both_in_blocks(registration: Registration, worker: Any, cache: Cache) -> bool:
    """Whether the backend's own blocks hold keys, and then values, in rows."""
    layers, _, key_order = cache
    orders = [registration.orders(worker, layer)[0] for layer in layers]
    return key_order is KeyOrder.ROW_MAJOR and all(
        order.dimensions[:2] == ("block", "kv") for order in orders
    )
