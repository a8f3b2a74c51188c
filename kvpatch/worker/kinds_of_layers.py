"""Which kind of cache each layer of a worker has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvpatch.worker.cache_kinds import (
    BACKENDS,
    DERIVED,
    DERIVES,
    OF_SEVERAL,
    ROWS,
    SLOTS_BY_HEAD,
    SPECS,
    WITH_DTYPE,
    WITH_VARIABLE,
    Holds,
    Kind,
    unknown,
)
from kvpatch.worker.release_worker import ReleaseWorker

#: Whose classes the table is about; others may have the same names. The second is the project's own
#: attention backend for a CPU, which no wheel has.
_PACKAGES = ("vllm.", "experiments.engines.torch_attention")


def kind_of(release: ReleaseWorker, layer: str, *, has_slots: bool = False) -> Kind:
    """Returns the kind of a layer's cache, by its spec and by the layer's own backend.

    Args:
        has_slots: True if a block has slots of all heads in place of heads (from 0.29).
    """
    configuration = release.worker.vllm_config
    spec, backend = release.spec_of(layer), _backend_of(configuration, layer)
    of_spec = None if spec is None else _by_spec(spec)
    found = of_spec or (ROWS if backend is None else kind_of_backend(backend))
    of_dtype = _by_dtype(str(configuration.cache_config.cache_dtype))
    if of_dtype is not None:
        found = of_dtype if found.holds is Holds.ROWS else replace(found, joins=False)
    if has_slots and found not in SLOTS_BY_HEAD:
        return replace(found, holds=Holds.WHOLE, mixes_heads=True, joins=False)
    return found


def has_slots(release: ReleaseWorker, layer: str) -> bool:
    """True if a layer's blocks have slots in place of heads, by its spec (from 0.29)."""
    return getattr(release.spec_of(layer), "num_head_slots", None) is not None


def kind_of_backend(backend: type) -> Kind:
    """Returns what a backend's blocks hold; one that vLLM derives for a purpose holds the same."""
    name = backend.__name__
    routed = _routed_to(backend)
    if routed:
        return _common([kind_of_backend(each) for each in routed])
    for kind in backend.__mro__:
        of_vllm = kind.__module__.startswith(_PACKAGES)
        if not of_vllm or kind.__name__ not in BACKENDS or not name.endswith(kind.__name__):
            continue
        prefix = name.removesuffix(kind.__name__)
        if prefix and prefix not in DERIVED and not DERIVES.fullmatch(prefix):
            continue
        variable = WITH_VARIABLE.get(kind.__name__)
        found = variable[1] if variable and _is_set(variable[0]) else BACKENDS[kind.__name__]
        if prefix not in DERIVED:
            return found
        derived = DERIVED[prefix]
        return derived if found.holds is Holds.ROWS else replace(derived, joins=False)
    return unknown(f"{backend.__module__}.{name}, an attention backend")


def _routed_to(backend: type) -> tuple[type, ...]:
    """The two backends of one that vLLM has made of them, under another name (from 0.30)."""
    if not backend.__module__.startswith(_PACKAGES):
        return ()
    found = (getattr(backend, f"{route}_backend_cls", None) for route in ("general", "causal"))
    return tuple(each for each in found if isinstance(each, type))


def _common(kinds: Sequence[Kind]) -> Kind:
    """Returns what blocks hold that several backends read and write; they have one spec."""
    strange = next((kind for kind in kinds if not kind.is_known), None)
    if strange is not None:
        return strange
    return kinds[0] if all(kind == kinds[0] for kind in kinds) else OF_SEVERAL


def _by_spec(spec: Any) -> Kind | None:
    """Returns what a spec says beside its backend; None for nothing."""
    name = type(spec).__name__
    if name not in SPECS or not type(spec).__module__.startswith(_PACKAGES):
        return unknown(f"{type(spec).__module__}.{name}, a KVCacheSpec")
    return SPECS[name]


def _by_dtype(dtype: str) -> Kind | None:
    return next((kind for start, kind in WITH_DTYPE.items() if dtype.startswith(start)), None)


def _backend_of(configuration: Any, layer: str) -> Any:
    """Its backend; None of a layer that does not say (any on 0.10.0; with states <= 0.10.1)."""
    layers = configuration.compilation_config.static_forward_context
    ask = getattr(layers.get(layer), "get_attn_backend", None)
    return None if ask is None else ask()


def _is_set(variable: str) -> bool:
    from vllm import envs

    return bool(getattr(envs, variable, False))
