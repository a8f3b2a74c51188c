"""Gives a worker that has registered its caches the reader that fills them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import inf
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.proxies import AgentProxy, replaced
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.nixl_proxy import ReadingAgent
from kvpatch.load.reader import CheckMakers, Destination, Reader
from kvpatch.peer.agent_metadata import places_digest
from kvpatch.peer.block_shapes import kv_split_of
from kvpatch.peer.cross_layer_blocks import RegisteredCrossLayerBlocks
from kvpatch.peer.inspected_caches import (
    Cache,
    InspectedCaches,
    are_in_regions,
    has_blocks_of,
    is_plain,
)
from kvpatch.peer.other_releases import Notifications
from kvpatch.peer.remote_ranks import places_of_states
from kvpatch.transfer.lease import Leases
from kvpatch.worker.local_geometry import LocalGeometry, backend_layouts, local_geometry_of
from kvpatch.worker.recurrent_state import StatePages, states_digest
from kvpatch.worker.registered_caches import DeviceCaches
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state
from kvpatch.worker.vllm_bugs import (
    ask_for_tiles,
    take_planned_blocks,
    takes_heads_for_tokens,
)

#: vLLM's own default of ``decoder_kv_blocks_ttl``.
_READ_BACK_SECONDS = 480


def attach_reader(
    release: ReleaseWorker, kv_caches: Mapping[str, Any], own: InspectedCaches
) -> None:
    """Gives a worker its reader, where its cache is one that can be read into."""
    worker = release.worker
    is_misread = (
        release.facts.topology_has_block_size
        and own.cache is not None
        and takes_heads_for_tokens(worker, own.cache[0])
    )
    if is_misread:
        take_planned_blocks(worker)
    if release.computes_on_amx():
        ask_for_tiles()
    state = worker_state(worker)
    if not can_read(release, own) or own.cache is None or own.behind is None:
        if state.held(RegisteredCrossLayerBlocks) is not None:
            raise RegistrationRefused(
                "kvcached's contiguous layout cannot be read into here (context parallelism, "
                "vLLM's own host buffer, kernel blocks smaller than the tensors', or recurrent "
                "states that are not one behind the other)",
                "set KVCACHED_CONTIGUOUS_LAYOUT=false",
            )
        return
    agent = worker.nixl_wrapper
    if isinstance(agent, ReadingAgent):  # of an earlier registration
        agent.stop_reading()
        agent = agent.__wrapped__
    else:
        agent = AgentProxy(agent)
    ours = _local_geometry(release, own, own.cache, is_misread=is_misread)
    layers, groups, _ = own.cache
    behind, blocks = state.held(DeviceCaches), state.held(RegisteredCrossLayerBlocks)
    device, mode = kv_caches[next(iter(layers))].device, "staged"
    if behind is None:
        shown, mode = None if blocks is None else layers, settings.transfer_mode()
        destination = Destination(kv_caches, device, shown, blocks, states=own.states)
    else:  # the device's cache behind what is registered
        destination = Destination(behind.tensors, device, own.behind[0], caches=behind.caches)
    reader = Reader(ours, groups, destination, mode)
    reader.leases = leases_of(worker, release.facts)
    reader.understood = Notifications(worker, release.facts).understood
    reader.book = state.book
    makers = state.of(CheckMakers).values()
    reader.check_makers = tuple(make(release, own, reader) for make in makers)
    state.hold(ours)
    state.hold(reader)
    worker.nixl_wrapper = ReadingAgent(agent, reader, worker)
    watch_divided_blocks(worker, release.facts)
    release.admit_larger_blocks()


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
    return (
        own.cache is not None
        and is_plain(release)
        and has_blocks_of(release.worker.block_size, own.cache)
        and (
            worker_state(release.worker).held(RegisteredCrossLayerBlocks) is not None
            or not own.states
            or are_in_regions(release, own.states)
        )
    )


def _local_geometry(
    release: ReleaseWorker, own: InspectedCaches, cache: Cache, *, is_misread: bool
) -> LocalGeometry:
    layers, groups, key_order = cache
    state = worker_state(release.worker)
    blocks = state.held(RegisteredCrossLayerBlocks)
    shown = layers if blocks is None else blocks.shown
    ours = local_geometry_of(release, shown, key_order)
    if own.blocks_hold_both:
        ours = replace(ours, kv_split=kv_split_of(ours))
    known = backend_layouts(release)
    ours = replace(
        ours,
        misreads_blocks=is_misread,
        planned_layout=state.planned_layout,
        backend_layout=next(iter(known)) if len(known) == 1 else None,
    )
    if len(groups) > 1:
        ours = replace(ours, groups=tuple(group.layers for group in groups))
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
