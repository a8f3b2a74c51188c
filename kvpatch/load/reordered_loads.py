"""The loads that the release reorders for a CPU: those of peers of another backend only.

From 0.20 on a D whose keys lie by column reorders what it has read of a peer whose backend has
rows. It knows by one flag of its worker, which the first such peer sets for good: from then on it
would reorder the loads of every peer, those of peers like it and those that we have placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpatch.core.errors import ReadRefused
from kvpatch.load.read_request import engine_of
from kvpatch.worker.state import worker_state


@dataclass
class ReorderedLoads:
    """The loads of one worker that the release reorders.

    Attributes:
        peers: the engine ids of peers of another backend that were left to the release.
        arriving: the loads that were on their way when the release last looked: a load's own list
            of blocks, and True if it is from such a peer. None before the flag was up.
    """

    peers: set[str] = field(default_factory=set)
    arriving: Sequence[tuple[Any, bool]] | None = None

    def is_reordered(self, block_ids: Any) -> bool:
        """True if a load's blocks are another backend's rows.

        Args:
            block_ids: the very list that the load's metadata has.
        """
        if self.arriving is None:  # a handshake's thread has set the flag since: its peer is new
            return False
        for blocks, is_other in self.arriving:
            if blocks is block_ids:
                return is_other
        raise ReadRefused(
            f"vLLM would reorder {len(block_ids)} blocks of a load that was not on its way",
            "use one attention backend on both sides",
        )


def note_peer(worker: Any, metadata: Any) -> None:
    """Books a peer as the release has; it may have come back as an engine of another backend."""
    peers = worker_state(worker).of(ReorderedLoads).peers
    is_other = metadata.attn_backend_name != worker.backend_name
    if worker.enable_heterogeneous_attn_post_process and is_other:
        peers.add(metadata.engine_id)
    else:
        peers.discard(metadata.engine_id)


def note_loads(worker: Any) -> None:
    """Notes whose loads are coming, before the release looks at them and may reorder them."""
    state = worker_state(worker)
    loads = state.of(ReorderedLoads)
    loads.arriving = [
        (blocks, engine_of(meta, state.facts) in loads.peers)
        for meta in worker._recving_metadata.values()
        for blocks in meta.local_physical_block_ids[:1]
    ]
