"""Registers cross-layer blocks (kvcached's contiguous layout).

The release cannot register them: it computes addresses from the page of a layer. It is
shown tensors of the layout that it knows, over the same memory, which nobody reads or
writes through; NIXL is handed the allocation once; peers are told of cross-layer blocks, and
every read goes through the reader, which knows where things really lie.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from kvpatch.core.errors import RegistrationRefused, UnreadableGeometry
from kvpatch.core.proxies import ObjectProxy, replaced
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.cross_layer_blocks import (
    CrossLayerBlocks,
    layer_axes,
    places_of,
    read_cross_layer_blocks,
    shares_place,
)
from kvpatch.geometry.layout_strides import layer_by_layer
from kvpatch.kvcached.layer_by_layer_tensors import layer_by_layer_state, layer_by_layer_tensors
from kvpatch.peer.agent_metadata import (
    CrossLayerForm,
    packed_digest,
    places_digest,
    restated,
)
from kvpatch.peer.block_shapes import tokens_of
from kvpatch.worker.kv_cache_groups import packed_groups
from kvpatch.worker.local_geometry import number_heads
from kvpatch.worker.recurrent_state import StateInPool, states_digest, states_in
from kvpatch.worker.registered_caches import (
    LayerCache,
    differ_in_page_bytes,
    differ_in_shape,
    page_bytes_of,
    read_layers,
)
from kvpatch.worker.release_worker import ReleaseWorker

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.registration")


@dataclass(frozen=True)
class RegisteredCrossLayerBlocks:
    """The blocks that a worker has registered in place of its tensors.

    Attributes:
        pool: where the blocks really lie.
        shown: the caches of the tensors that the release was shown.
        states: the layers with recurrent state in the blocks.
        ends: the end of each attention layer's part, in bytes from a block's beginning.
    """

    pool: CrossLayerBlocks
    form: CrossLayerForm
    shown: Mapping[str, LayerCache]
    states: Mapping[str, StateInPool]
    ends: Mapping[str, int]

    def end_of(self, layers: Iterable[str]) -> int:
        """Returns the bytes that a group's layers take of a block, from its beginning."""
        return max(self.ends[name] for name in layers)


def register_cross_layer_blocks(
    wrapped: Callable[..., Any],
    release: ReleaseWorker,
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, LayerCache],
) -> tuple[Any, RegisteredCrossLayerBlocks]:
    """Registers tensors whose blocks are cross-layer blocks, or refuses them.

    Returns what the release returns, and what it has registered.
    """
    worker = release.worker
    groups = release.groups(layers)
    places = places_of([group.layers & layers.keys() for group in groups])
    packed = packed_groups(worker, release.facts) if differ_in_page_bytes(layers) else None
    pool = cross_layer_blocks_of({name: kv_caches[name] for name in layers}, layers, places, packed)
    parts = release.planned_kernel_blocks or 1
    others = kv_caches.keys() - layers.keys() if release.facts.has_cache_groups else ()
    for name in others:
        if release.spec_of(name) is None:
            raise RegistrationRefused(
                f"layer {name} has no cache of its own, and blocks of all layers are registered "
                "of caches alone",
                "use layer-by-layer blocks (KVCACHED_CONTIGUOUS_LAYOUT=false)",
            )
    states = states_in(kv_caches, layers, pool, parts)
    first = layers[pool.layers[0]].planes[0]
    axes_only = CrossLayerForm(first.counts.block_tokens, 1, pool.axes)
    shown: dict[str, Any] = layer_by_layer_tensors(
        release, kv_caches, layers, pool, axes_only.inner_layout, blocks_outermost=bool(states)
    )
    for name, state in states.items():
        of_layer = layer_by_layer_state(state, pool, parts)
        shown[name] = of_layer if isinstance(kv_caches[name], list | tuple) else of_layer[0]
    # Regions are numbered as layers come: as a plain cache of this model has them.
    shown = {name: shown[name] for name in kv_caches}
    stated = release.stated_layout
    if "head" in pool.axes and stated is not None:  # the layout of the tensors that it is shown
        worker.kv_cache_layout = layer_by_layer(axes_only.inner_layout, like=stated)
    told = places_digest(places) if packed is None else packed_digest(packed)
    # The thread that answers handshakes never ends, and is not to keep the worker.
    this_worker, facts = ref(worker), release.facts

    def restate(metadata: Any) -> Any:
        asked = ReleaseWorker(this_worker(), facts)
        form = _form_of(asked, pool, layers, told, states)
        return _as_cross_layer(metadata, facts, pool, form)

    agent = _OneRegion(worker.nixl_wrapper, pool)
    with replaced(worker, nixl_wrapper=agent), listener_told(release, restate):
        result = wrapped(shown)
    form = _form_of(release, pool, layers, told, states)
    _restate_payload(release, restate)
    read = number_heads(worker, read_layers(release, shown, first_head=first.first_head))
    _LOG.info(
        "%d blocks of all %d layers are registered as rows of %d bytes",
        pool.blocks,
        len(layers),
        pool.block_bytes,
    )
    ends = {
        name: layer.planes[0].address - pool.address + page_bytes_of(layer)
        for name, layer in layers.items()
    }
    return result, RegisteredCrossLayerBlocks(pool, form, read, states, ends)


def cross_layer_blocks_of(
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, LayerCache],
    places: Sequence[Sequence[str]],
    packed: Sequence[Sequence[str]] | None = None,
) -> CrossLayerBlocks:
    """Returns the cross-layer blocks that all of a worker's attention tensors are.

    Args:
        places: the layers that are to have one place in a block, by place.
        packed: each group's layers as they follow one another; None where all groups have the same
            places.
    """
    pools = {cache.untyped_storage().data_ptr() for cache in kv_caches.values()}
    if len(pools) > 1:
        raise RegistrationRefused(
            f"the blocks of {len(kv_caches)} layers hold keys and values side by side, or others' "
            f"between them, and lie in {len(pools)} allocations: expected kvcached's contiguous "
            "layout, which has one pool of all layers",
            "set KVCACHED_CONTIGUOUS_LAYOUT=true",
        )
    try:
        if packed is not None and all(layers.keys() >= set(group) for group in packed):
            return read_cross_layer_blocks(
                [{n: layers[n].planes for n in group} for group in packed]
            )
        for first, *others in places:
            axes = layer_axes(layers[first].planes)
            for other in others:
                if not shares_place(layers[first].planes, layers[other].planes, axes):
                    raise RegistrationRefused(
                        f"{first} and {other}, of two attention groups, are expected to have one "
                        "place in kvcached's contiguous layout, as many bytes there and one "
                        f"layout inside, and have {layers[first].planes[0]} and "
                        f"{layers[other].planes[0]}",
                        "set KVCACHED_CONTIGUOUS_LAYOUT=false",
                    )
        pool = read_cross_layer_blocks([{first: layers[first].planes for first, *_ in places}])
    except UnreadableGeometry as error:
        raise RegistrationRefused(
            f"kvcached's contiguous layout cannot be read here: {error}",
            "set KVCACHED_CONTIGUOUS_LAYOUT=false",
        ) from error
    if differ_in_shape(layers) and len(set(pool.layer_bytes)) > 1:
        raise RegistrationRefused(
            "layers of several shapes have unlike bytes in a block of kvcached's contiguous "
            f"layout: {sorted(set(pool.layer_bytes))}",
            "set KVCACHED_CONTIGUOUS_LAYOUT=false",
        )
    return pool


class _OneRegion(ObjectProxy):
    """A NIXL agent that registers the one pool whatever regions the release names."""

    def __init__(self, agent: Any, pool: CrossLayerBlocks) -> None:
        super().__init__(agent)
        self._self_pool = pool
        self._self_is_named = False

    def get_reg_descs(self, descs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns NIXL's own for the pool; refuses a release that registers in more than one go."""
        if self._self_is_named or not isinstance(descs, list) or not descs:
            raise RegistrationRefused(
                "this vLLM registers memory in a way that kvcached's contiguous layout is not "
                "known to fit",
                "set KVCACHED_CONTIGUOUS_LAYOUT=false",
            )
        self._self_is_named = True
        pool = self._self_pool
        whole = [(pool.address, pool.size_bytes, *descs[0][2:])]
        return self.__wrapped__.get_reg_descs(whole, *args, **kwargs)


def _as_cross_layer(
    metadata: Any, facts: ReleaseFacts, pool: CrossLayerBlocks, form: CrossLayerForm
) -> Any:
    """Returns a copy of a worker's agent metadata that describes its cross-layer blocks.

    No release takes it for its own layout: those <= 0.12 compare the backend's name, those
    from 0.11.1 on the layout's, and all the length of a block where there are no heads.
    """
    own = {name: getattr(metadata, name) for name in facts.agent_metadata}
    stated: dict[str, Any] = {
        "kv_caches_base_addr": [pool.address],
        "num_blocks": pool.blocks,
        "block_len": pool.block_bytes,  # <= 0.10.2
        "block_lens": [pool.block_bytes],
        "block_strides": [pool.block_bytes],  # from 0.29
        "kv_cache_layout": str(form),
        "attn_backend_name": f"{own.get('attn_backend_name', '')} {form}",
        "region_num_blocks": [pool.blocks],  # this and all below from 0.30
        "region_group_ids": (own.get("region_group_ids") or [])[:1],
        "region_names": [pool.layers[0]],
        "region_mem_types": (own.get("region_mem_types") or [])[:1],
        "region_members": [],
        "packed_member_layouts": {},
    }
    return restated(metadata, facts, stated)


def _form_of(
    release: ReleaseWorker,
    pool: CrossLayerBlocks,
    layers: Mapping[str, LayerCache],
    places: str,
    states: Mapping[str, StateInPool],
) -> CrossLayerForm:
    """Returns the form, once the worker knows its kernel blocks (<= 0.17 as it registers)."""
    tokens = min(tokens_of(layers, layers))
    specs = {name: release.spec_of(name) for name in states}
    held = {name: state.place for name, state in states.items()}
    digest = states_digest(places, held, specs)
    return CrossLayerForm(tokens, release.kernel_blocks_per_block, pool.axes, digest)


def listener_told(
    release: ReleaseWorker, restate: Callable[[Any], Any]
) -> AbstractContextManager[None]:
    """Restates a worker's metadata, while inside, if it answers handshakes itself (<= 0.11.0)."""
    if release.facts.listens_in_scheduler:
        return nullcontext()
    listen = release.worker._nixl_handshake_listener

    def listener(metadata: Any, *more: Any, **named: Any) -> Any:
        return listen(restate(metadata), *more, **named)

    return replaced(release.worker, _nixl_handshake_listener=listener)


def _restate_payload(release: ReleaseWorker, restate: Callable[[Any], Any]) -> None:
    """Restates the metadata of a worker that waits to be fetched (from 0.11.1)."""
    worker, facts = release.worker, release.facts
    if not facts.listens_in_scheduler:
        return
    payload = worker.xfer_handshake_metadata
    if not facts.encodes_metadata:
        worker.xfer_handshake_metadata = restate(payload)
        return
    import msgspec

    kind = vars(sys.modules[type(payload).__module__])["NixlAgentMetadata"]
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=kind)
    told = copy.copy(payload)
    told.agent_metadata_bytes = msgspec.msgpack.encode(restate(metadata))
    worker.xfer_handshake_metadata = told
