"""Reads the tensors that a worker is handed, and gives it its checks of loads and its reader."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf, lcm
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.proxies import AgentProxy, replaced
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import tells_states
from kvpatch.load.nixl_proxy import ReadingAgent
from kvpatch.load.reader import CheckMakers, Loads, Reader
from kvpatch.peer.agent_metadata import places_digest
from kvpatch.peer.block_shapes import heads_of, kv_split_of, tokens_of
from kvpatch.peer.cross_layer_blocks import RegisteredCrossLayerBlocks
from kvpatch.peer.other_releases import Notifications
from kvpatch.peer.remote_ranks import places_of_states
from kvpatch.transfer.lease import Leases
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.local_geometry import LocalGeometry, local_geometry_of, number_heads
from kvpatch.worker.recurrent_state import StatePages, division_of, pages_of, states_digest
from kvpatch.worker.registered_caches import DeviceCaches, LayerCache, differ_in_shape, read_layers
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state
from kvpatch.worker.vllm_bugs import (
    ask_for_tiles,
    mend_block_size,
    refuse_steps_under_way,
)

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
    cache = _read_cache(release, kv_caches, leave_state=True)
    device = worker_state(release.worker).held(DeviceCaches)
    states: Mapping[str, StatePages] = {}
    if cache is not None and len(cache[0]) < len(kv_caches):
        states = _read_states(release, kv_caches, cache)
        cache = cache if states and device is None else None
    behind = cache if device is None else _read_cache(release, device.tensors)
    has_both = False
    if cache is not None and cache[2] is KeyOrder.ROW_MAJOR:
        orders = [release.orders(layer)[0].dimensions for layer in cache[0]]
        has_both = all(dimensions[:2] == ("block", "kv") for dimensions in orders)
    return InspectedCaches(cache, behind, states, has_both)


def _read_states(
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


def _is_plain(release: ReleaseWorker) -> bool:
    """True if reads go straight to the registered cache, all tokens of it.

    False with a host buffer of the release's, memory of two kinds, or context parallelism: there
    the release's own rules hold.
    """
    return not (
        release.has_own_mirror
        or (release.facts.names_regions and release.worker._mixed_mem_types)
        or max(release.context_sizes, default=1) > 1
    )


def _has_blocks_of(block_tokens: int, cache: Cache) -> bool:
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


def _read_cache(
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
    layers = number_heads(worker, read_layers(release, kv_caches, key_order, first_head))
    if not layers or (len(layers) < len(kv_caches) and not leave_state):
        return None
    return layers, release.groups(layers), key_order


# --- once it has registered ----------------------------------------------------------------------

#: vLLM's own default of ``decoder_kv_blocks_ttl``.
_READ_BACK_SECONDS = 480


def attach_reader(
    release: ReleaseWorker, kv_caches: Mapping[str, Any], own: InspectedCaches
) -> None:
    """Puts checks around a worker's loads; gives it its reader if its cache can be read into."""
    worker = release.worker
    is_misread = own.cache is not None and mend_block_size(release, own.cache[0])
    if release.computes_on_amx():
        ask_for_tiles()
    state = worker_state(worker)
    agent = worker.nixl_wrapper
    if isinstance(agent, ReadingAgent):  # of an earlier registration
        agent.stop_reading()
        agent = agent.__wrapped__
    else:
        agent = AgentProxy(agent)
    # Who switches the patch off has P's leases looked at no more than its words.
    has_leases = "stale_blocks" not in settings.disabled_slugs()
    loads = Loads(
        partial(leases_of, worker, release.facts) if has_leases else Leases,
        Notifications(worker, release.facts).understood,
        state.book,
    )
    reader = _reader_of(release, kv_caches, own, is_misread=is_misread)
    makers = state.of(CheckMakers).values()
    loads.check_makers = tuple(make(release, reader) for make in makers)
    state.hold(loads)
    worker.nixl_wrapper = ReadingAgent(agent, loads, reader, worker)
    if reader is not None:
        state.hold(reader.ours)
        state.hold(reader)
        watch_divided_blocks(worker, release.facts)
        release.admit_larger_blocks()


def _reader_of(
    release: ReleaseWorker,
    kv_caches: Mapping[str, Any],
    own: InspectedCaches,
    *,
    is_misread: bool,
) -> Reader | None:
    """Returns a worker's reader; None where its cache cannot be read into."""
    state = worker_state(release.worker)
    blocks = state.held(RegisteredCrossLayerBlocks)
    if not can_read(release, own) or own.cache is None or own.behind is None:
        if blocks is not None:
            raise RegistrationRefused(
                "kvcached's contiguous layout cannot be read into here (context parallelism, "
                "vLLM's own host buffer, kernel blocks smaller than the tensors', or recurrent "
                "states that are not one behind the other)",
                "set KVCACHED_CONTIGUOUS_LAYOUT=false",
            )
        return None
    ours = _local_geometry(release, own, own.cache, is_misread=is_misread)
    layers, groups, _ = own.cache
    behind = state.held(DeviceCaches)
    filled, mode = ours.layers if blocks is None else layers, settings.transfer_mode()
    if behind is not None:  # the device's cache behind what is registered
        blocks, filled, mode = None, own.behind[0], "staged"
    return Reader(
        ours,
        groups,
        kv_caches if behind is None else behind.tensors,
        filled,
        kv_caches[next(iter(layers))].device,
        own.states,
        mode,
        cross_layer=blocks,
        caches=None if behind is None else behind.caches,
    )


def leases_of(worker: Any, facts: ReleaseFacts) -> Leases:
    """Returns what the worker's release and configuration say of leases."""
    if facts.grants_leases:
        configured = worker.vllm_config.kv_transfer_config.get_from_extra_config
        return Leases(
            _seconds(lambda: configured("kv_lease_duration", facts.blocks_kept_seconds)),
            _seconds(lambda: worker._lease_extension),
            _seconds(lambda: configured("decoder_kv_blocks_ttl", _READ_BACK_SECONDS)),
        )
    import vllm.envs

    seconds = _seconds(lambda: vllm.envs.VLLM_NIXL_ABORT_REQUEST_TIMEOUT)
    return Leases(seconds, read_back_seconds=seconds)


def _seconds(read: Callable[[], Any]) -> float:
    """Returns a setting; without end where it is none: a D looks at no setting of P's."""
    try:
        return float(read())
    except (TypeError, ValueError, OverflowError):
        return inf


def can_read(release: ReleaseWorker, own: InspectedCaches) -> bool:
    """True if a worker's cache is one that can be read into."""
    if own.cache is None or not _is_plain(release):
        return False
    if not _has_blocks_of(release.worker.block_size, own.cache):
        return False
    if not own.states or worker_state(release.worker).held(RegisteredCrossLayerBlocks) is not None:
        return True
    # A peer's pages follow from its regions: each layer's begin where a region does.
    begins = {pages.address for pages in own.states.values()}
    layout, names_regions = release.stated_layout, release.facts.names_regions
    has_heads = any(layer.has_heads for layer in own.cache[0].values())
    is_told = tells_states(layout, names_regions=names_regions, has_heads=has_heads)
    return is_told and begins <= {*release.addresses}


def _local_geometry(
    release: ReleaseWorker, own: InspectedCaches, cache: Cache, *, is_misread: bool
) -> LocalGeometry:
    layers, groups, key_order = cache
    state = worker_state(release.worker)
    blocks = state.held(RegisteredCrossLayerBlocks)
    shown = layers if blocks is None else blocks.shown
    ours = local_geometry_of(release, shown, key_order)
    ours = replace(
        ours,
        misreads_blocks=is_misread,
        planned_layout=state.planned_layout,
        kv_split=kv_split_of(ours) if own.blocks_hold_both else None,
        groups=tuple(group.layers for group in groups) if len(groups) > 1 else None,
    )
    return _with_states(release.worker, ours, own.states, blocks) if own.states else ours


def _with_states(
    worker: Any,
    ours: LocalGeometry,
    states: Mapping[str, StatePages],
    cross_layer: RegisteredCrossLayerBlocks | None,
) -> LocalGeometry:
    """Returns our side with its states' pages as the release was shown them."""
    if cross_layer is None:
        ours = replace(ours, states=states)
        told = states_digest(
            places_digest(ours.places), places_of_states(ours), worker._layer_specs
        )
        return replace(ours, cross_layer_places=told)
    shown, pool = {}, cross_layer.pool
    for name, state in cross_layer.states.items():
        blocks = states[name].blocks
        page_bytes = pool.size_bytes // (len(pool.layers) * blocks)
        address = pool.address + state.place * page_bytes * blocks
        shown[name] = replace(states[name], address=address, stride_bytes=page_bytes)
    return replace(ours, states=shown, cross_layer_places=cross_layer.form.places)


# --- the release's handles of its own blocks in parts, of which reads by kvpatch need none ---

#: Stands for any list of handles; a transfer with one of these fails.
_NO_HANDLES: defaultdict[int, None] = defaultdict(lambda: None)


class DividedBlockHandles(dict[Any, Any]):
    """The release's handles of its own blocks in parts, which it makes once for a ratio.

    It asks whether they are there before it makes them, every block of the cache once for each
    rank of the peer. They are said to be where that peer is read by us, whose plans need none.
    """

    def __init__(self, prepared: dict[Any, Any]) -> None:
        super().__init__(prepared)
        # Handshakes have threads of their own.
        self._this_thread = threading.local()

    def __contains__(self, key: object) -> bool:
        return getattr(self._this_thread, "makes_none", False) or super().__contains__(key)

    def __missing__(self, key: object) -> defaultdict[int, None]:
        return _NO_HANDLES

    def making_none(self) -> AbstractContextManager[None]:
        """Makes this thread find handles for all ratios, while inside."""
        return replaced(self._this_thread, makes_none=True)


def watch_divided_blocks(worker: Any, facts: ReleaseFacts) -> None:
    """Makes a worker's table a :class:`DividedBlockHandles`; a second call changes nothing."""
    if not facts.divides_own_blocks:
        return
    table = worker.src_xfer_handles_by_tp_ratio
    if not isinstance(table, DividedBlockHandles):
        table = worker.src_xfer_handles_by_tp_ratio = DividedBlockHandles(table)
    worker_state(worker).hold(table)


def blocks_undivided(worker: Any) -> AbstractContextManager[None]:
    """Keeps the release from dividing the worker's blocks for a peer, while inside."""
    table = worker_state(worker).held(DividedBlockHandles)
    return nullcontext() if table is None else table.making_none()
