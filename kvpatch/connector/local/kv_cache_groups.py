"""Cache groups: which layers have one block table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvpatch.core.errors import RegistrationRefused


@dataclass(frozen=True)
class Group:
    """Layers with one block table.

    Attributes:
        window_tokens: of a sliding window, whose last blocks alone a peer may hold and
            send; 0 for a group that looks at every token.
        has_state: whether a block is recurrent state, and the last one of a list is all.
        is_clipped: whether peers name the window's last blocks alone, and not all of the
            prompt's with null blocks for those that slid out of it.
    """

    layers: frozenset[str]
    window_tokens: int
    has_state: bool = False
    is_clipped: bool = True


def one_group(worker: Any, layers: Iterable[str]) -> tuple[Group, ...]:
    """On releases <= 0.17 every layer has the one block table."""
    return (Group(frozenset(layers), window_tokens=0),)


def planned_groups(worker: Any, layers: Iterable[str]) -> tuple[Group, ...]:
    """The groups of the worker's plan, in the order in which block ids are sent.

    Raises:
        RegistrationRefused: a layer is in no group.
    """
    plan = worker.kv_cache_config
    found = getattr(plan, "transfer_groups", plan.kv_cache_groups)  # a choice of them from 0.29
    is_clipped = bool(getattr(worker, "_is_hma_required", True))
    groups = tuple(
        Group(
            frozenset(g.layer_names),
            _window_tokens(g.kv_cache_spec),
            _has_state(g.kv_cache_spec),
            is_clipped,
        )
        for g in found
    )
    grouped = frozenset[str]().union(*(group.layers for group in groups))
    if not grouped.issuperset(layers):
        raise RegistrationRefused(
            f"layers in no cache group: {', '.join(sorted(set(layers) - grouped))}"
        )
    return groups


def packed_groups(worker: Any) -> tuple[tuple[str, ...], ...] | None:
    """The layers of each block table as the plan places them in rows of blocks; None on <= 0.28.

    From 0.29 on, where blocks are outermost, a row is divided by each group in its own way:
    its layers follow one another, those with one page together.
    """
    plan = getattr(worker, "kv_cache_config", None)
    tensors = getattr(plan, "kv_cache_tensors", ())
    if plan is None or not all(hasattr(tensor, "layers") for tensor in tensors):
        return None
    placed = [name for tensor in tensors for name in tensor.layers]
    groups = getattr(plan, "transfer_groups", plan.kv_cache_groups)
    return tuple(
        tuple(name for name in placed if name in members)
        for members in (frozenset(group.layer_names) for group in groups)
    )


def whole_group(scheduler: Any) -> int | None:
    """The first group with full attention, as a scheduler has them; None without one.

    What other groups name of a prompt does not tell how many blocks it fills.
    """
    plan = getattr(scheduler, "kv_cache_config", None)  # from 0.18
    if plan is None:
        return 0
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [_members(group.kv_cache_spec)[0] for group in plan.kv_cache_groups]
    return next((n for n, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), None)


def _has_state(spec: Any) -> bool:
    return any("MambaSpec" in (kind.__name__ for kind in type(s).__mro__) for s in _members(spec))


def counted_group(scheduler: Any) -> int | None:
    """The group whose list of blocks tells how many tokens a block has; None without one."""
    whole = whole_group(scheduler)
    if whole is not None:
        return whole
    alone = window_alone(scheduler)
    return None if alone is None else alone[0]


def window_alone(scheduler: Any) -> tuple[int, int] | None:
    """(group, its window in tokens) as a scheduler has them, where no group looks at all tokens.

    The largest window names the most blocks. A window of 0 where all of a prompt's blocks
    are named all the same. None where another kind of group is among them.
    """
    specs = [
        _members(group.kv_cache_spec)[0] for group in scheduler.kv_cache_config.kv_cache_groups
    ]
    if not specs or any(type(spec).__name__ != "SlidingWindowSpec" for spec in specs):
        return None
    windows = [_window_tokens(spec) for spec in specs]
    number = windows.index(max(windows))
    return number, windows[number] if getattr(scheduler, "_is_hma_required", True) else 0


def _window_tokens(spec: Any) -> int:
    # SlidingWindowSpec and its kind; a full-attention layer may carry one unused.
    windows = (s.sliding_window for s in _members(spec) if "SlidingWindow" in type(s).__name__)
    return max(windows, default=0)


def _members(spec: Any) -> tuple[Any, ...]:
    of_layers = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs
    return tuple(of_layers.values()) if of_layers else (spec,)
