"""HND or NHD, as a release lays out caches for its own backends, whatever layout it states.

Backends without an order of their own (Triton <= 0.17, FlexAttention, ROCm's) have NHD on
every engine, while the connector asks for HND and states it (0.10.1 to 0.28).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.dimension_order import DimensionOrder
from kvpatch.geometry.layout_strides import (
    LAYER_BY_LAYER,
    NAMED_LAYOUTS,
    inner_layout,
    inner_layout_of_axes,
)
from kvpatch.worker.local_geometry import layout_shown_by, state_layout_of_strides
from kvpatch.worker.registered_caches import LayerCache
from kvpatch.worker.release_worker import ReleaseWorker

#: On releases <= 0.11.0 workers keep a backend's name alone: those that lay out what is stated.
_AS_STATED = ("FLASH_ATTN_VLLM_V1", "FLASHINFER_VLLM_V1", "FLASH_ATTN", "FLASHINFER")


def backend_layouts(release: ReleaseWorker) -> frozenset[str]:
    """The orders of heads and tokens that this worker's backends have; empty if unknown."""
    stated, backends = release.stated_layout, release.attention_backends
    inner = inner_layout(stated)
    if inner is None or stated not in LAYER_BY_LAYER:
        return frozenset()
    is_named = not backends and release.worker.backend_name in _AS_STATED
    if stated in NAMED_LAYOUTS or is_named:
        return frozenset({inner})
    from vllm.config import set_current_vllm_config

    of_vllm = [b for b in backends if b.__module__.partition(".")[0] == "vllm"]
    with set_current_vllm_config(release.worker.vllm_config):
        found = [_order_of(backend) for backend in of_vllm]
    return frozenset() if None in found else frozenset(filter(None, found))


def _order_of(backend: Any) -> str | None:
    """As the release's runner allocates for a backend; None where nobody knows."""
    try:
        names = DimensionOrder.probe(backend.get_kv_cache_shape).dimensions
    except UnreadableGeometry:
        return None
    if not {"token", "head"} <= set(names):
        return None
    with suppress(AttributeError, NotImplementedError):
        names = tuple(names[axis] for axis in backend.get_kv_cache_stride_order())
    return inner_layout_of_axes(names)


def state_own_order(release: ReleaseWorker, layers: Mapping[str, LayerCache]) -> str | None:
    """Has a worker state the order that its tensors have, where an allocator chose another.

    Returns:
        What it would have stated, if that is another: it may be said by a peer with the same
        allocator and without kvpatch, and by one that has that layout.
    """
    known, shown = backend_layouts(release), layout_shown_by(layers)
    if not known or shown is None or shown in known:
        return None
    stated = release.stated_layout
    state_layout_of_strides(release, layers)
    return None if release.stated_layout == stated else stated
