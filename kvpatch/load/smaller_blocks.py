"""Peers of smaller blocks that the release reads itself, since no reader of ours can.

Here: what such blocks are. Which peers are let pass is in smaller_blocks_admission, which of P's
blocks a request is handed in smaller_blocks_pairing, and how one fails alone for which there are
none in smaller_blocks_reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpatch.core.releases import ReleaseFacts

ADVICE = "use one --block-size on both sides"


@dataclass(frozen=True)
class Blocks:
    """One side's blocks.

    Attributes:
        kernel_tokens: of a kernel block.
        parts: kernel blocks in one of the blocks that ids count.
    """

    kernel_tokens: int
    parts: int

    @property
    def tokens(self) -> int:
        """Of one of the blocks that ids count."""
        return self.kernel_tokens * self.parts


def smaller_blocks(
    worker: Any, engine_id: str, facts: ReleaseFacts
) -> tuple[Blocks, Blocks | None] | None:
    """Our blocks, and those of a peer that has smaller ones as the release has booked it.

    None for any other peer. Theirs are None where nobody knows into what they are cut.
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
    """Whether ranks of either side share out tokens (decode context parallelism, from 0.29)."""
    if not facts.states_context_parallelism:
        return False
    theirs = worker.transfer_topo.get_engine_info(engine_id).remote_dcp_size
    return bool(worker.dcp_size > 1 or theirs > 1)
