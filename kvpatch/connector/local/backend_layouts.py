"""HND or NHD, as a release lays out caches for its own backends, whatever layout it states.

Backends without an order of their own (Triton <= 0.17, FlexAttention, ROCm's) have NHD on
every engine, while the connector asks for HND and states it (0.10.1 to 0.28).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvpatch.connector.local.local_geometry import call_layout_by_its_strides, layout_shown_by
from kvpatch.connector.local.registered_caches import LayerCache
from kvpatch.connector.local.release_layouts import attention_backends
from kvpatch.geometry import (
    LAYER_BY_LAYER,
    NAMED_LAYOUTS,
    DimensionOrder,
    UnreadableGeometry,
    inner_layout,
    inner_layout_of_axes,
)

#: On releases <= 0.11.0 workers keep a backend's name alone: those that lay out what is stated.
_AS_STATED = ("FLASH_ATTN_VLLM_V1", "FLASHINFER_VLLM_V1", "FLASH_ATTN", "FLASHINFER")


def backend_layouts(worker: Any) -> frozenset[str]:
    """The orders of heads and tokens that this worker's backends have; empty if unknown."""
    stated = getattr(worker, "kv_cache_layout", None)  # from 0.10.1
    inner = inner_layout(stated)
    if inner is None or stated not in LAYER_BY_LAYER:
        return frozenset()
    every = _backends(worker)
    is_named = not every and getattr(worker, "backend_name", None) in _AS_STATED
    if stated in NAMED_LAYOUTS or is_named:
        return frozenset({inner})
    backends = [b for b in every if b.__module__.partition(".")[0] == "vllm"]
    with _configuration(worker):
        found = [_order_of(backend) for backend in backends]
    return frozenset() if None in found else frozenset(filter(None, found))


def _backends(worker: Any) -> tuple[Any, ...]:
    if getattr(worker, "attn_backends", None):  # from 0.18
        return attention_backends(worker)
    topology = getattr(worker, "kv_topo", None)  # from 0.11.1
    one = getattr(worker, "attn_backend", None) or getattr(topology, "attn_backend", None)
    return () if one is None else (one,)


def _configuration(worker: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(worker.vllm_config)


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


def state_own_order(worker: Any, layers: Mapping[str, LayerCache]) -> str | None:
    """Has a worker state the order that its tensors have, where an allocator chose another.

    Returns:
        What it would have stated, if that is another: it may be said by a peer with the same
        allocator and without kvpatch, and by one that has that layout.
    """
    known, shown = backend_layouts(worker), layout_shown_by(layers)
    if not known or shown is None or shown in known:
        return None
    stated = worker.kv_cache_layout
    call_layout_by_its_strides(worker, layers)
    return None if worker.kv_cache_layout == stated else str(stated)
