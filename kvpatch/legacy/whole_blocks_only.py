"""0.10.0 loads a prompt into whole blocks and one more for drafted tokens.

P names whole blocks alone. Where these hold fewer tokens than D wants, that release takes P's last
blocks for later ones, or ends: D computes the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch.connector import read_request
from kvpatch.connector.speculative_decoding import reserves_slots
from kvpatch.connector.stated_prompt import read_prompt
from kvpatch.core import seams, settings
from kvpatch.core.ledger import Site, Wrapper
from kvpatch.core.releases import ReleaseFacts


def _get_num_new_matched_tokens(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def matched(request: Any, num_computed_tokens: int) -> Any:
        found = wrapped(request, num_computed_tokens)
        needed = num_computed_tokens + found[0]
        return found if not found[0] or _holds(instance, request, needed) else (0, False)

    return matched(*args, **kwargs)


def _holds(scheduler: Any, request: Any, tokens: int) -> bool:
    """True if the blocks that P names hold so many tokens of a prompt."""
    if reserves_slots(scheduler.vllm_config):
        return False
    params = request.kv_transfer_params or {}
    stated, blocks = read_prompt(params), params.get("remote_block_ids")
    if stated is not None:
        return stated.tokens >= tokens
    if not isinstance(blocks, list | tuple):
        return False
    block_tokens = settings.peer_block_size() or int(scheduler.block_size)
    held = max((len(group) for group in read_request.groups(blocks)), default=0)
    return held * block_tokens >= tokens


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    """What is wrapped in a release that needs it."""
    return {seams.scheduler_matched_tokens(facts): _get_num_new_matched_tokens}
