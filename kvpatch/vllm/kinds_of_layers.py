"""Which kind of cache each layer of a worker has."""

from __future__ import annotations

from typing import Any

from kvpatch.vllm.cache_kinds import BACKENDS, ROWS, Kind


def kind_of(worker: Any, layer: str) -> Kind:
    """The kind of a layer's cache, by the backend that the layer itself names."""
    backend = _backend_of(worker, layer)
    return ROWS if backend is None else BACKENDS.get(backend.__name__, ROWS)


def _backend_of(worker: Any, layer: str) -> Any:
    """The layer's backend; None to 0.10.1, where layers do not say."""
    config = getattr(worker, "vllm_config", None)
    compilation = getattr(config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", {})
    ask = getattr(layers.get(layer), "get_attn_backend", None)
    return None if ask is None else ask()
