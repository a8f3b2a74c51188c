"""Tells by the number of P's blocks that P's ranks share out a block's tokens as D's ranks do.

<= 0.28 no handshake states context parallelism. With it a block of D's holds several times the
tokens. A P without it names more blocks, and the release loads the last of them.
"""

from __future__ import annotations

import logging
from math import prod
from typing import Any

from kvpatch.core.recent_engines import RecentEngines
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.load import read_request
from kvpatch.worker.state import scheduler_state

_LOG = logging.getLogger("kvpatch.unlike_engines")


class _ToldPeers(RecentEngines[bool]):
    """The peers of which one scheduler has logged it."""


def context_ranks(scheduler: Any, facts: ReleaseFacts) -> int:
    """Returns how many of this engine's ranks share out the tokens of a block."""
    parallel = scheduler.vllm_config.parallel_config
    return prod(int(getattr(parallel, name)) for name in facts.context_sizes)


def may_load(scheduler: Any, request: Any, facts: ReleaseFacts) -> bool:
    """True if only a P with D's own sizes can have named the blocks of a request.

    Always true from 0.29 on, where handshakes state the sizes and the release pairs unlike ones.
    A prompt that fits into one of D's blocks may have one block at any P: D computes it.
    """
    ranks = context_ranks(scheduler, facts)
    parameters = request.kv_transfer_params or {}
    if facts.states_context_parallelism or ranks == 1 or not parameters.get("remote_block_ids"):
        return True
    held = read_request.stated_tokens(parameters)
    held = held or read_request.prefilled_tokens(scheduler, request, facts)
    blocks = -(-held // (int(scheduler.block_size) * ranks))
    found = {len(group) for group in read_request.groups(parameters["remote_block_ids"])}
    told = scheduler_state(scheduler).of(_ToldPeers)
    if found != {blocks} and parameters["remote_engine_id"] not in told:
        told[str(parameters["remote_engine_id"])] = True
        _LOG.warning(
            "the prompt of request %s is computed here: P names %s blocks of %d tokens, and with "
            "context parallelism as here (%d) they would be %d: use one "
            "--decode-context-parallel-size and one --block-size on both sides",
            *(shown(request.request_id), sorted(found), held, ranks, blocks),
        )
    return blocks > 1 and found == {blocks}
