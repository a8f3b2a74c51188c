"""Shows a release keys and values that lie apart where its backend's blocks hold both.

Every release has tensors that it takes for two regions: with keys first <= 0.25, or, where one
region a layer is all that it knows (from 0.26), as two layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpatch.core.errors import RegistrationRefused
from kvpatch.worker.release_worker import ReleaseWorker


def shown_apart(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """What the registration must be handed in place of such caches, which have blocks first.

    Raises:
        RegistrationRefused: the release would take them for something else.
    """
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
