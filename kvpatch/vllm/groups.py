"""Cache groups: which layers have one block table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvpatch._errors import RegistrationRefused


@dataclass(frozen=True)
class Group:
    """Layers with one block table.

    Attributes:
        window_tokens: of a sliding window, whose last blocks alone a peer may hold and
            send; 0 for a group that looks at every token.
        has_state: whether a block is recurrent state, and the last one of a list is all.
    """

    layers: frozenset[str]
    window_tokens: int
    has_state: bool = False


def one_group(worker: Any, layers: Iterable[str]) -> tuple[Group, ...]:
    """Up to 0.17 every layer has the one block table."""
    return (Group(frozenset(layers), window_tokens=0),)


def planned_groups(worker: Any, layers: Iterable[str]) -> tuple[Group, ...]:
    """The groups of the worker's plan, in the order in which block ids are sent.

    Raises:
        RegistrationRefused: a layer is in no group.
    """
    plan = worker.kv_cache_config
    found = getattr(plan, "transfer_groups", plan.kv_cache_groups)  # a choice of them from 0.29
    groups = tuple(
        Group(
            frozenset(g.layer_names), _window_tokens(g.kv_cache_spec), _has_state(g.kv_cache_spec)
        )
        for g in found
    )
    grouped = frozenset[str]().union(*(group.layers for group in groups))
    if not grouped.issuperset(layers):
        raise RegistrationRefused(
            f"layers in no cache group: {', '.join(sorted(set(layers) - grouped))}"
        )
    return groups


def whole_group(scheduler: Any) -> int | None:
    """The first group with full attention, as a scheduler has them; None without one.

    What other groups name of a prompt does not tell how many blocks it fills. None with
    recurrent state too, which is left to the release.
    """
    plan = getattr(scheduler, "kv_cache_config", None)  # from 0.18
    if plan is None:
        return 0
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    specs = [_members(group.kv_cache_spec)[0] for group in plan.kv_cache_groups]
    if any(isinstance(spec, MambaSpec) for spec in specs):
        return None
    return next((n for n, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), None)


def _has_state(spec: Any) -> bool:
    return any("MambaSpec" in (kind.__name__ for kind in type(s).__mro__) for s in _members(spec))


def _window_tokens(spec: Any) -> int:
    # SlidingWindowSpec and its kind; a full-attention layer may carry one unused.
    windows = (s.sliding_window for s in _members(spec) if "SlidingWindow" in type(s).__name__)
    return max(windows, default=0)


def _members(spec: Any) -> tuple[Any, ...]:
    of_layers = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs
    return tuple(of_layers.values()) if of_layers else (spec,)
