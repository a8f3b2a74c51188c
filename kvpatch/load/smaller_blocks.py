"""Peers of smaller blocks that the release reads itself, since no reader of ours can.

Here: what such blocks are, and which peers are let pass. Which of P's blocks a request is handed,
and how one fails alone for which there are none, is in smaller_blocks_pairing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.worker.release_worker import ReleaseWorker

ADVICE = "use one --block-size on both sides"


class Blocks(NamedTuple):
    """The blocks of one side.

    Attributes:
        kernel_tokens: of a kernel block.
        parts: kernel blocks in one of the blocks that ids count.
    """

    kernel_tokens: int
    parts: int

    @property
    def tokens(self) -> int:
        """Returns the tokens of one of the blocks that ids count."""
        return self.kernel_tokens * self.parts


def smaller_blocks(
    worker: Any, engine_id: str, facts: ReleaseFacts
) -> tuple[Blocks, Blocks | None] | None:
    """Returns our blocks, and those of a peer that has smaller ones as the release has booked it.

    None for any other peer. Theirs are None where it is not known into what they are cut.
    """
    own_tokens = getattr(worker, "block_size", None)  # missing in workers of vLLM's own tests
    if own_tokens is None or engine_id not in worker._remote_agents or not facts.topology:
        return None
    parts: int | None = None
    if facts.topology == "transfer_topo":
        booked = worker.transfer_topo.get_engine_info(engine_id)
        tokens, parts = booked.remote_block_size, booked.remote_physical_blocks_per_logical
    else:
        tokens = worker.kv_topo.remote_block_size[engine_id]
    if tokens >= own_tokens:
        return None
    ours = Blocks(own_tokens, worker._physical_blocks_per_logical_kv_block)
    if parts is None and ours.parts == 1:
        parts = 1
    return ours, None if parts is None else Blocks(tokens, parts)


def shares_tokens(worker: Any, engine_id: str, facts: ReleaseFacts) -> bool:
    """True if ranks of either side share out tokens (decode context parallelism, from 0.29)."""
    if not facts.states_context_parallelism:
        return False
    theirs = worker.transfer_topo.get_engine_info(engine_id).remote_dcp_size
    return bool(worker.dcp_size > 1 or theirs > 1)


def why_misread(release: ReleaseWorker) -> str:
    """Returns why the release puts wrong bytes into larger blocks, whatever the request, or ""."""
    contexts = max(release.context_sizes[:1], default=1)
    is_mla, layout = bool(release.worker.use_mla), release.stated_layout
    return why_joined_wrongly(release.key_order(), contexts, layout, release.facts, is_mla=is_mla)


def why_joined_wrongly(
    key_order: KeyOrder | None,
    decode_contexts: int,
    layout: str | None,
    facts: ReleaseFacts,
    *,
    is_mla: bool,
) -> str:
    """Does the same by what is known of a cache.

    Args:
        key_order: None where nobody knows it.
        decode_contexts: ranks that share out a block's tokens.
        layout: as it is stated.
    """
    if key_order is not KeyOrder.ROW_MAJOR:
        return "takes keys that the backend keeps by column for rows"
    if decode_contexts > 1 and not facts.states_context_parallelism:
        return "does not know that ranks share out the tokens of a block"
    if facts.pairs_heads_by_layout:
        return ""
    if is_mla:  # [block, 1, token, channel], of which it takes the second for tokens
        return "zeroes all of a prompt's last block (0.29 to 0.31)" if facts.names_layouts else ""
    if facts.cache_shape != "keys first":
        return "puts heads in wrong places of larger blocks (0.23 to 0.31)"
    return "" if layout == "HND" else "takes NHD for HND in larger blocks"
