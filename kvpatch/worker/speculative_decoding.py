"""Slots that an engine reserves behind a prompt for tokens that speculative decoding drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpatch.worker.kv_cache_groups import Group

#: Ways to speculate that reserve no slots.
_WITHOUT_SLOTS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


def reserves_slots(vllm_config: Any) -> bool:
    """Whether an engine reserves slots for drafted tokens behind a prompt."""
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.method not in _WITHOUT_SLOTS


def drafted_tokens(vllm_config: Any) -> int:
    """Returns how many slots an engine may reserve behind a prompt for drafted tokens."""
    if not reserves_slots(vllm_config):
        return 0
    return int(vllm_config.speculative_config.num_speculative_tokens)


def hides_ends_of_lists(
    vllm_config: Any, groups: Sequence[Group], *, layers_differ_in_shape: bool
) -> bool:
    """Whether nobody can tell where the prompt's blocks end in lists that drafts lengthen.

    A window's list is the end of a table. Slots for drafted tokens can add a block to it,
    which only a list of full attention would tell. A draft model has caches of its own, so
    that both sides have one or neither has.
    """
    windows_alone = all(group.window_tokens for group in groups)
    return reserves_slots(vllm_config) and (windows_alone or layers_differ_in_shape)
