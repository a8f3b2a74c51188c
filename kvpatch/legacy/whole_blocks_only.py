"""0.10.0 loads a prompt into whole blocks and one more for drafted tokens.

P names whole blocks alone. Where these hold fewer tokens than D wants, that release takes P's last
blocks for later ones, or ends: D computes the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch.core import seams, settings
from kvpatch.core.ledger import Site, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load import read_request
from kvpatch.load.stated_prompt import read_prompt
from kvpatch.worker.speculative_decoding import reserves_slots
from kvpatch.worker.unpatched_workers import is_applied


def _get_num_new_matched_tokens(
    wrapped: Callable[..., Any], instance: Any, request: Any, num_computed_tokens: int
) -> Any:
    count, is_async = wrapped(request, num_computed_tokens)
    if not count:
        return count, is_async
    held = _held_tokens(instance, request, num_computed_tokens + count)
    count = max(0, min(count, held - num_computed_tokens))
    return count, is_async and count > 0


def _held_tokens(scheduler: Any, request: Any, wanted: int) -> int:
    """Returns up to where D loads a prompt; 0 where P's blocks hold too few of the wanted tokens.

    A P with kvpatch states how many they hold: D loads as many of them as fill its own blocks.
    """
    if reserves_slots(scheduler.vllm_config):
        return 0
    params, block_tokens = request.kv_transfer_params or {}, int(scheduler.block_size)
    stated, blocks = read_prompt(params), params.get("remote_block_ids")
    if stated is not None and is_applied("same_prompt"):
        return stated.tokens - stated.tokens % block_tokens
    if not isinstance(blocks, list | tuple):
        return 0
    named = max((len(group) for group in read_request.groups(blocks)), default=0)
    held = named * (settings.peer_block_size() or block_tokens)
    return wanted if held >= wanted else 0


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    """What is wrapped in a release that needs it."""
    return {seams.scheduler_matched_tokens(facts): _get_num_new_matched_tokens}
