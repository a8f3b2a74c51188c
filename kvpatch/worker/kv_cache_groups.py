"""Cache groups: which layers have one block table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from kvpatch.core.errors import UnexpectedCaches
from kvpatch.core.releases import ReleaseFacts

_STATE = "MambaSpec"
_WINDOW = "SlidingWindowSpec"
_SPANNING = ("FullAttentionSpec", "ChunkedLocalAttentionSpec")
#: Specs of layers whose blocks hold all tokens of a request. RSWASpec (from 0.25) is none: an
#: engine lets go of blocks of the answer, and computes the answer from the prompt and a window.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")


@dataclass(frozen=True)
class Group:
    """Layers with one block table.

    Attributes:
        window_tokens: of a sliding window, whose last blocks alone a peer may hold and
            send; 0 for a group that looks at every token.
        has_state: whether a block is recurrent state, and the last one of a list is all.
        spans_prompt: whether a list has a place for each block of the prompt. A window's may
            not, and a state's or a ring's never has.
    """

    layers: frozenset[str]
    window_tokens: int
    has_state: bool = False
    spans_prompt: bool = True


def planned_groups(plan: Any, facts: ReleaseFacts, layers: Iterable[str]) -> tuple[Group, ...]:
    """The groups of a worker's plan, in the order in which block ids are sent."""
    groups = tuple(
        Group(
            frozenset(g.layer_names),
            _window_tokens(g.kv_cache_spec),
            _is_kind(g.kv_cache_spec, _STATE),
            _is_kind(g.kv_cache_spec, *_SPANNING),
        )
        for g in transferred_groups(plan, facts)
    )
    grouped = frozenset[str]().union(*(group.layers for group in groups))
    if not grouped.issuperset(layers):
        raise UnexpectedCaches(
            f"layers in no cache group: {', '.join(sorted(set(layers) - grouped))}"
        )
    return groups


def transferred_groups(plan: Any, facts: ReleaseFacts) -> Sequence[Any]:
    """The groups of a plan whose blocks are sent, as the release has them: a choice from 0.29."""
    found: Sequence[Any] = plan.transfer_groups if facts.plans_transfers else plan.kv_cache_groups
    return found


def tokens_of_group(plan: Any, facts: ReleaseFacts, number: int) -> int:
    """Returns the tokens of a block of a plan's transferred group."""
    return int(_members(transferred_groups(plan, facts)[number].kv_cache_spec)[0].block_size)


def packed_groups(worker: Any, facts: ReleaseFacts) -> tuple[tuple[str, ...], ...] | None:
    """The layers of each block table as they follow one another in a cross-layer block.

    From 0.29 on, where blocks are outermost, each group divides such a block in its own way, and
    the plan has those of its layers together that have one page. None on <= 0.28.
    """
    if not facts.plans_transfers:
        return None
    plan = worker.kv_cache_config
    placed = [name for tensor in plan.kv_cache_tensors for name in tensor.layers]
    return tuple(
        tuple(name for name in placed if name in members)
        for members in (frozenset(g.layer_names) for g in transferred_groups(plan, facts))
    )


def counted_group(scheduler: Any, facts: ReleaseFacts) -> int | None:
    """The group whose list of blocks tells how many tokens a block has; None without one.

    The first group with full attention, or else the one with the largest window, which names
    the most blocks. What other groups name of a prompt does not tell how many blocks it fills.
    """
    if not facts.has_cache_groups:
        return 0
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = _first_specs(scheduler)
    whole = (n for n, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec))
    alone = window_alone(scheduler)
    return next(whole, None if alone is None else alone[0])


def counted_block_tokens(scheduler: Any, facts: ReleaseFacts) -> int:
    """The tokens of a block of the group that `counted_group` names.

    Groups of unlike heads have blocks of unlike tokens, and the scheduler states the fewest.
    """
    number = counted_group(scheduler, facts)
    if number is None or not facts.has_cache_groups:
        return int(scheduler.block_size)
    return int(_first_specs(scheduler)[number].block_size)


def window_alone(scheduler: Any) -> tuple[int, int] | None:
    """(group, its window in tokens) as a scheduler has them, where no group looks at all tokens.

    The largest window names the most blocks. A window of 0 where all of a prompt's blocks
    are named all the same. None where another kind of group is among them.
    """
    specs = _first_specs(scheduler)
    if not specs or any(type(spec).__name__ != _WINDOW for spec in specs):
        return None
    windows = [_window_tokens(spec) for spec in specs]
    number = windows.index(max(windows))
    return number, windows[number] if scheduler._is_hma_required else 0


def is_of_whole_prompt(scheduler: Any, facts: ReleaseFacts) -> bool:
    """True if a cache of the scheduler's plan serves no prompt but the one that filled it.

    A recurrent state stands behind all of its tokens. Attention that looks ahead within a prompt
    (``non_causal``, from 0.24 on) has other keys for each prompt.
    """
    return has_state(scheduler, facts) or any(
        getattr(one, "non_causal", False) for one in _planned_members(scheduler, facts)
    )


def has_state(scheduler: Any, facts: ReleaseFacts) -> bool:
    """True if a cache of the scheduler's plan is recurrent state."""
    return any(_is_kind(spec, _STATE) for spec in _planned_specs(scheduler, facts))


def has_drafted_states(scheduler: Any, facts: ReleaseFacts) -> bool:
    """True if a step with drafts has a state for each of them, in blocks of their own.

    Which of these goes on behind the tokens that were taken only the workers know.
    """
    members = _planned_members(scheduler, facts)
    return any(getattr(one, "num_speculative_blocks", 0) for one in members)


def _planned_specs(scheduler: Any, facts: ReleaseFacts) -> list[Any]:
    plan = scheduler.kv_cache_config if facts.has_cache_groups else None
    return [] if plan is None else [group.kv_cache_spec for group in plan.kv_cache_groups]


def _planned_members(scheduler: Any, facts: ReleaseFacts) -> list[Any]:
    return [one for spec in _planned_specs(scheduler, facts) for one in _members(spec)]


def fills_no_more_blocks(
    scheduler: Any, facts: ReleaseFacts, loaded_tokens: int, slots: int
) -> bool:
    """True if the blocks of the loaded tokens have as many slots.

    <= 0.17 all slots of loaded blocks count as computed.
    """
    if facts.counts_loaded_slots:
        return loaded_tokens == slots
    planned = scheduler.kv_cache_config.kv_cache_groups
    sizes = {int(spec.block_size) for g in planned for spec in _members(g.kv_cache_spec)}
    return all(-(-loaded_tokens // size) == -(-slots // size) for size in sizes)


def still_has(
    scheduler: Any, held_tokens: int, needed_tokens: int, prompt_tokens: int, *, cuts_finer: bool
) -> bool:
    """True if P keeps what attention behind fewer of its tokens looks at.

    P lets go of blocks in front of the window before its last token: if it `cuts_finer`, into
    smaller blocks than D, of more tokens than D would. The last token of all of D's is computed
    again.
    """
    counts = held_tokens, needed_tokens
    seen = held_tokens, min(needed_tokens, prompt_tokens - 1)
    for group in scheduler.kv_cache_config.kv_cache_groups:
        for spec in _members(group.kv_cache_spec):
            if type(spec).__name__ in _FULL:
                continue
            window, block_tokens = _window_tokens(spec), int(spec.block_size)
            first_blocks = {max(0, tokens - window + 1) // block_tokens for tokens in seen}
            last_blocks = {(tokens - 1) // block_tokens for tokens in counts}
            if not window or len(first_blocks) > 1 or len(last_blocks) > 1:
                return False
            if cuts_finer and held_tokens >= window:
                return False
    return True


def has_windows(plan: Any, tokens: float = inf) -> bool:
    """True if some layers of a plan look at a window that so many tokens fill."""
    return any(0 < _window_tokens(group.kv_cache_spec) <= tokens for group in plan.kv_cache_groups)


def first_in_windows(manager: Any, request_id: str) -> Iterator[tuple[Any, Any]]:
    """Yields (manager of a group with windows, its first block of a request) of a block manager."""
    groups = manager.kv_cache_config.kv_cache_groups
    for group, one in zip(groups, manager.coordinator.single_type_managers, strict=False):
        if not _window_tokens(group.kv_cache_spec):
            continue
        held = one.req_to_blocks.get(request_id, ())
        first = next((block for block in held if not block.is_null), None)
        if first is not None:
            yield one, first


def has_plain_windows(plan: Any) -> bool:
    """True if a plan has sliding windows, and beside them full attention at most."""
    members = (one for group in plan.kv_cache_groups for one in _members(group.kv_cache_spec))
    kinds = {type(one).__name__ for one in members}
    return _WINDOW in kinds and kinds <= {_WINDOW, "FullAttentionSpec"}


def begins_behind_window(scheduler: Any, tokens: int) -> bool:
    """True if vLLM gives a load of a prompt no block for the first key of its last token.

    It counts on a token behind the prompt, and computes the last one again, which looks at one key
    more. If that is the last of a block, it is missing. A load of one token less has the block, and
    otherwise the same ones: False where it would not fill as many.
    """
    plan = scheduler.kv_cache_config
    if not has_plain_windows(plan):
        return False
    specs = [one for group in plan.kv_cache_groups for one in _members(group.kv_cache_spec)]
    return all((tokens - 1) % int(one.block_size) for one in specs) and any(
        0 < window <= tokens and (tokens - window + 1) % int(one.block_size) == 0
        for one in specs
        for window in (_window_tokens(one),)
    )


def _first_specs(scheduler: Any) -> list[Any]:
    groups = scheduler.kv_cache_config.kv_cache_groups
    return [_members(group.kv_cache_spec)[0] for group in groups]


def _is_kind(spec: Any, *names: str) -> bool:
    """True if a layer of a group is of one of these classes of vLLM."""
    return any(kind.__name__ in names for s in _members(spec) for kind in type(s).__mro__)


def _window_tokens(spec: Any) -> int:
    # SlidingWindowSpec and its kind; a full-attention layer may carry one unused.
    windows = (s.sliding_window for s in _members(spec) if "SlidingWindow" in type(s).__name__)
    return max(windows, default=0)


def _members(spec: Any) -> tuple[Any, ...]:
    of_layers = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs alone has them
    return tuple(of_layers.values()) if of_layers else (spec,)


def spec_of(spec: Any, layer: str) -> Any:
    """A layer's own spec, of the one that its group has."""
    of_layers = getattr(spec, "kv_cache_specs", None)
    return of_layers[layer] if of_layers else spec


# --- slots that an engine reserves behind a prompt for drafted tokens ------------------------

#: Ways to speculate that reserve no slots.
_WITHOUT_SLOTS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


def reserves_slots(vllm_config: Any) -> bool:
    """True if an engine reserves slots for drafted tokens behind a prompt."""
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.method not in _WITHOUT_SLOTS


def drafted_tokens(vllm_config: Any) -> int:
    """Returns how many such slots an engine may reserve."""
    reserves = reserves_slots(vllm_config)
    return int(vllm_config.speculative_config.num_speculative_tokens) if reserves else 0


def hides_ends_of_lists(
    vllm_config: Any, groups: Sequence[Group], *, layers_differ_in_shape: bool
) -> bool:
    """True if nobody can tell where the prompt's blocks end in lists that drafts lengthen.

    A window's list is the end of a table. Slots for drafted tokens can add a block to it,
    which only a list of full attention would tell. A draft model has caches of its own, so
    that both sides have one or neither has.
    """
    windows_alone = all(group.window_tokens for group in groups)
    have_unlike_blocks = layers_differ_in_shape and len(groups) > 1
    return reserves_slots(vllm_config) and (windows_alone or have_unlike_blocks)
