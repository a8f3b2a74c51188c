"""Which engines a scheduler has to get to know before it loads from them, by release."""

from __future__ import annotations

import sys
from typing import Any

from kvpatch import _env
from kvpatch.vllm.groups import whole_group, window_alone
from kvpatch.vllm.likeness import reserves_slots
from kvpatch.vllm.unstated import CUT_INTO, Introductions, states_parts, step_of_cuts


def introductions_of(scheduler: Any, *, full_blocks_only: bool) -> Introductions:
    """Where the handshake states no block size.

    0.10.0 loads a prompt into whole blocks and one more for drafted tokens: it takes the
    last blocks of P's for these, a block off, or ends.
    """
    return Introductions(
        scheduler.block_size,
        full_blocks_only=full_blocks_only,
        allows_none=full_blocks_only and reserves_slots(scheduler.vllm_config),
        must_prove=full_blocks_only and _must_prove(scheduler.vllm_config.model_config),
    )


def _must_prove(model_config: Any) -> bool:
    """Whether layouts differ: with one head or one latent a token they do not."""
    has_heads = not model_config.use_mla and model_config.get_total_num_kv_heads() > 1
    return has_heads and _env.unstated_layout() == "prove"


def introductions_to_cuts(scheduler: Any, *, module: str) -> Introductions | None:
    """Where it does not state how blocks are cut; None where none are."""
    from vllm.platforms import current_platform

    step = step_of_cuts(scheduler.block_size, str(current_platform.device_type))
    if step is None or states_parts([sys.modules.get(module)]):
        return None
    window_tokens = 0
    if whole_group(scheduler) is None:
        alone = window_alone(scheduler)
        if alone is None or scheduler.block_size % CUT_INTO:
            return None
        window_tokens = alone[1]
    return Introductions(scheduler.block_size, step_tokens=step, window_tokens=window_tokens)
