"""Whether P's ranks share out the tokens of a block as D's do, by the number of P's blocks.

<= 0.28 no handshake states context parallelism. Where D has it, its blocks hold as many times more
tokens, and a P without it names more blocks, of which the release takes the last ones.
"""

from __future__ import annotations

import logging
from math import prod
from typing import Any

from kvpatch.connector import read_request
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown

_LOG = logging.getLogger("kvpatch.unlike_engines")


def may_load(scheduler: Any, request: Any, facts: ReleaseFacts) -> bool:
    """True if the blocks that a request names can only be those of a P with D's own sizes.

    A prompt of one of D's blocks has one block at any P: D computes it.
    """
    parallel = scheduler.vllm_config.parallel_config
    ranks = prod(int(getattr(parallel, name)) for name in facts.context_sizes)
    parameters = request.kv_transfer_params or {}
    if ranks == 1 or not parameters.get("remote_block_ids"):
        return True
    held = parameters.get("remote_num_tokens")
    held = held or read_request.prefilled_tokens(scheduler, request, facts)
    blocks = -(-held // (int(scheduler.block_size) * ranks))
    found = {len(group) for group in read_request.groups(parameters["remote_block_ids"])}
    if found != {blocks}:
        _LOG.warning(
            "the prompt of request %s is computed here: P names %s blocks of %d tokens, and with "
            "context parallelism as here (%d) they would be %d: use one "
            "--decode-context-parallel-size and one --block-size on both sides",
            *(shown(request.request_id), sorted(found), held, ranks, blocks),
        )
    return blocks > 1 and found == {blocks}
