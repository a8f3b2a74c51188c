"""The tensors that the release is shown: it knows fewer orders of blocks than there are.

What it is handed is registered as it lies: keys and values that are far apart as regions of their
own, blocks that hold all layers as the cross-layer blocks of a pool.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.geometry.dimension_order import DimensionOrder
from kvpatch.geometry.layout_strides import block_bytes
from kvpatch.geometry.plane import Plane
from kvpatch.kvcached.pools import check_pools
from kvpatch.kvcached.transports import note_transport, refuse_cards
from kvpatch.load.mapped_pages import pages_behind
from kvpatch.peer.cross_layer_blocks import RegisteredCrossLayerBlocks, register_cross_layer_blocks
from kvpatch.worker.local_geometry import state_layout_of_strides, state_own_order
from kvpatch.worker.registered_caches import LayerCache, read_layers
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state
from kvpatch.worker.vllm_bugs import misread_states, strides_checked

if TYPE_CHECKING:
    import torch

#: What takes the tensors next: the release's own registration, or what stands before it.
Register = Callable[[Mapping[str, Any]], Any]

#: How the blocks of one layer lie: keys and values inside a block, in a region
#: each, or with other layers' between them.
Arrangement = Literal["together", "apart", "interleaved"]


def register_as_they_lie(
    register: Register,
    release: ReleaseWorker,
    kv_caches: Mapping[str, Any],
    *,
    is_read_by_us: bool,
) -> Any:
    """Registers tensors by the places where their blocks are, or refuses them.

    Args:
        is_read_by_us: True if the worker will have a reader, which knows cross-layer blocks.
    """
    state = worker_state(release.worker)
    state.drop(RegisteredCrossLayerBlocks)  # of an earlier registration
    state.planned_layout = None
    layers = read_layers(release, kv_caches)

    def as_cross_layer_blocks() -> Any:
        refuse_without_reads(
            release,
            "kvcached's contiguous layout",
            "KVCACHED_CONTIGUOUS_LAYOUT=false",
            reads=is_read_by_us,
        )
        result, blocks = register_cross_layer_blocks(register, release, kv_caches, layers)
        state.hold(blocks)
        return result

    if settings.is_kvcached_enabled():
        if not state.is_host_buffered:  # else they were looked at as that was made
            refuse_cards(release.nixl_backends, kv_caches)
            note_transport(kv_caches)
            check_pools(kv_caches, layers)
            pages = pages_behind(kv_caches, layers)
            if pages is not None:
                state.hold(pages)
        expected = {layer: release.orders(layer)[0] for layer in layers}
        if has_cross_layer_blocks(layers, expected, has_state=len(layers) < len(kv_caches)):
            return as_cross_layer_blocks()
        # Its tensors are what they are, whatever VLLM_KV_CACHE_LAYOUT asks for.
        state_layout_of_strides(release, layers)
    elif misread_states(release, kv_caches, layers):
        try:
            return as_cross_layer_blocks()
        except RegistrationRefused as error:
            raise RegistrationRefused(
                "recurrent state in blocks of all layers, which this vLLM reads from other places "
                "than it lies in, and cannot be read as kvcached's contiguous layout either: "
                f"{error.reason}",
                "set VLLM_KV_CACHE_LAYOUT=LBHNC",
            ) from error
    elif not state.is_host_buffered and not release.has_own_mirror:
        state.planned_layout = state_own_order(release, layers)
    shown = _with_keys_apart(release, kv_caches, layers)
    with strides_checked(release, layers):
        return register(shown)


def register_once(register: Register, worker: Any, kv_caches: Mapping[str, torch.Tensor]) -> Any:
    """Registers a tensor that layers share with the first of them alone (<= 0.10.1)."""
    owners = first_layers(kv_caches)
    if len(owners) < len(kv_caches) and worker.model_config.hf_config.model_type == "llama4":
        raise RegistrationRefused(
            f"{len(kv_caches)} layers share {len(owners)} tensors, and this release keeps a "
            "window per layer for llama4's local attention",
            "disable the hybrid KV cache manager (--disable-hybrid-kv-cache-manager)",
        )
    return register(owners)


def first_layers(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the first layer of every tensor, in the order of registration."""
    owners: dict[int, str] = {}
    for layer, cache in kv_caches.items():
        owners.setdefault(cache.data_ptr(), layer)
    return {layer: kv_caches[layer] for layer in owners.values()}


def _with_keys_apart(
    release: ReleaseWorker, kv_caches: Mapping[str, Any], layers: Mapping[str, LayerCache]
) -> Mapping[str, Any]:
    """Returns the tensors with keys first, where keys and values are apart; else as they are."""
    apart = {layer for layer, cache in layers.items() if is_split_inside(cache)}
    if not apart:
        return kv_caches
    if apart != kv_caches.keys():
        raise RegistrationRefused(
            f"{', '.join(sorted(apart))} keep keys and values apart and "
            f"{', '.join(sorted(kv_caches.keys() - apart))} do not: one worker can register one "
            "or the other",
            "set ENABLE_KVCACHED=false for this model",
        )
    state_layout_of_strides(release, layers)
    return shown_apart(release, kv_caches)


def arrangement(planes: tuple[Plane, ...]) -> Arrangement:
    """Returns how one layer's blocks lie, from the distance between them."""
    content_bytes = block_bytes(planes[:1])
    stride_bytes = planes[0].strides_bytes.block
    if stride_bytes == content_bytes * len(planes):
        return "together"
    if stride_bytes == content_bytes:
        return "apart"
    return "interleaved"


def is_split_inside(cache: LayerCache) -> bool:
    """True if keys and values are apart where the shape says that a block holds both.

    A keys-first tensor is two regions to every release that has such tensors.
    """
    blocks_first = cache.order.dimensions[:2] == ("block", "kv")
    return blocks_first and arrangement(cache.planes) == "apart"


def has_cross_layer_blocks(
    layers: Mapping[str, LayerCache],
    expected: Mapping[str, DimensionOrder],
    *,
    has_state: bool = False,
) -> bool:
    """True if any layer's blocks have other layers' between them.

    A single layer's have not, and are cross-layer blocks all the same where this release has keys
    and values in regions of their own, or packed. Not in hybrid models, in which the release
    itself has them together, so that a block may be a state's.
    """
    for layer, cache in layers.items():
        arranged = arrangement(cache.planes)
        as_expected = expected[layer].dimensions[:2] == ("block", "kv")
        if arranged == "interleaved" or (
            arranged == "together"
            and "kv" in cache.order.dimensions
            and not as_expected
            and not has_state
        ):
            return True
    return False


def refuse_without_reads(release: ReleaseWorker, what: str, setting: str, *, reads: bool) -> None:
    """Refuses a worker whose caches kvpatch alone can fill, by reading, where it does not read.

    Args:
        setting: that does without.
    """
    if not release.pulls:
        raise RegistrationRefused(
            f"in push mode P writes to D's memory, and {what} can only be filled by reads",
            f"use NixlConnector, which pulls, or {setting}",
        )
    if not reads:
        raise RegistrationRefused(
            f"{what} is filled by unlike_engines, which KVPATCH_DISABLE turns off",
            f"leave it on, or use {setting}",
        )


# --- keys and values that lie apart where a backend's blocks hold both -----------------------
#
# Every release has tensors that it takes for two regions: with keys first <= 0.25, or, where one
# region a layer is all that it knows (from 0.26), as two layers.


def shown_apart(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the registration must be handed in place of such caches."""
    if release.facts.cache_shape != "packed":
        _believe_in_keys_first(release)
        return {layer: cache.transpose(0, 1) for layer, cache in kv_caches.items()}
    storages = {cache.untyped_storage().data_ptr() for cache in kv_caches.values()}
    if len(storages) == 1 and not release.facts.names_layouts:
        raise RegistrationRefused(
            f"{len(kv_caches)} layers keep keys and values apart in one allocation, which this "
            "release takes for blocks that hold all layers",
            "give each layer an allocation",
        )
    return _as_layers(release, kv_caches)


def _believe_in_keys_first(release: ReleaseWorker) -> None:
    worker, source = release.worker, release.facts.shape_source
    if source == "flags":
        worker._use_flashinfer = False
    elif source == "topology":
        worker.kv_topo._is_kv_layout_blocks_first = False
    elif source == "backend":
        worker.attn_backend = _with_keys_first(worker.attn_backend)
    else:
        # The topology is made while registering and asks the first backend.
        worker.attn_backends = [
            b if release.is_of_state(b) else _with_keys_first(b) for b in worker.attn_backends
        ]


def _with_keys_first(backend: type) -> type:
    """The backend as this worker must see it; the backend itself is not touched."""

    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    shape = {"get_kv_cache_shape": staticmethod(get_kv_cache_shape)}
    return type(backend.__name__, (backend,), shape)


def _as_layers(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """One region a layer is all these releases know: each of keys and values becomes a layer."""
    worker, shown = release.worker, {}
    specs = dict(worker._layer_specs)
    for layer, cache in kv_caches.items():
        half = _half_page(release.spec_of(layer))
        del specs[layer]
        for part, name in enumerate(_names(layer)):
            shown[name] = cache.select(1, part)
            specs[name] = half
    worker._layer_specs = specs
    if release.facts.names_layouts:
        plan = worker.kv_cache_config
        groups = [
            replace(group, layer_names=[n for layer in group.layer_names for n in _names(layer)])
            for group in plan.kv_cache_groups
        ]
        worker.kv_cache_config = replace(plan, kv_cache_groups=groups)
    return shown


def _names(layer: str) -> tuple[str, str]:
    return f"{layer}.keys", f"{layer}.values"


def _half_page(spec: Any) -> Any:
    """A spec of the same kind whose page holds one of keys and values."""
    kind = type(spec)
    page_bytes = spec.page_size_bytes // 2
    half_kind = type(kind.__name__, (kind,), {"page_size_bytes": property(lambda _: page_bytes)})
    half = copy.copy(spec)
    object.__setattr__(half, "__class__", half_kind)
    return half
