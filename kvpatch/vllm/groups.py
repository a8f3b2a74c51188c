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
        window: whether the peer may send the last blocks only (a sliding window).
    """

    layers: frozenset[str]
    window: bool


def one_group(worker: Any, layers: Iterable[str]) -> tuple[Group, ...]:
    """Up to 0.17 every layer has the one block table."""
    return (Group(frozenset(layers), window=False),)


def planned_groups(worker: Any, layers: Iterable[str]) -> tuple[Group, ...]:
    """The groups of the worker's plan, in the order in which block ids are sent.

    Raises:
        RegistrationRefused: a layer is in no group.
    """
    plan = worker.kv_cache_config
    found = getattr(plan, "transfer_groups", plan.kv_cache_groups)  # a choice of them from 0.29
    groups = tuple(Group(frozenset(g.layer_names), _has_window(g.kv_cache_spec)) for g in found)
    grouped = frozenset[str]().union(*(group.layers for group in groups))
    if not grouped.issuperset(layers):
        raise RegistrationRefused(
            f"layers in no cache group: {', '.join(sorted(set(layers) - grouped))}"
        )
    return groups


def _has_window(spec: Any) -> bool:
    of_layers = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs
    specs = of_layers.values() if of_layers else (spec,)
    # SlidingWindowSpec and its kind; a full-attention layer may carry one unused.
    return any("SlidingWindow" in type(s).__name__ for s in specs)
