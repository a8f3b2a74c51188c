"""The blocks that a request names of a peer like us, held against what the peer has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpatch.connector import read_request
from kvpatch.connector.reading.reader import Reader
from kvpatch.core.errors import ReadRefused


def refuse_misnamed(
    worker: Any, reader: Reader, engine_id: str, entry: Any, *, expanded: bool
) -> None:
    """Refuses blocks that the peer does not have, and fewer than are to be filled.

    The release reads the first from another layer's blocks, and asserts the second.

    Args:
        expanded: whether the entry's lists are of kernel blocks here, or of logical ones.

    Raises:
        ReadRefused: the request names the wrong blocks.
    """
    ids = getattr(entry, "local_physical_block_ids", None) if expanded else None
    local = read_request.groups(entry.local_block_ids if ids is None else ids)
    is_met = engine_id in worker._remote_agents  # or hands are shaken now (from 0.32)
    blocks = worker.dst_num_blocks.get(engine_id) if is_met else None
    if blocks is None or not any(local) or _pairs_otherwise(worker, engine_id):
        return
    remote = read_request.groups(read_request.remote_blocks(entry))
    if len(remote) != len(local):
        raise ReadRefused(
            f"the request names blocks of {len(remote)} cache groups of engine {engine_id}, and "
            f"this model has {len(local)}"
        )
    if reader.has_state:  # pages of states are counted otherwise: the release's to judge
        return
    blocks = max((blocks, *_of_regions(worker, engine_id)))
    parts = 1 if expanded else reader.ours.kernel_blocks_per_block
    for theirs, ours in zip(remote, local, strict=True):
        last = max(theirs, default=0)
        if (last + 1) * parts > blocks:
            raise ReadRefused(
                f"the request names block {last} of engine {engine_id}, which has {blocks // parts}"
            )
        if len(theirs) < len(ours):
            raise ReadRefused(
                f"the request names {len(theirs)} blocks of engine {engine_id}, and the prompt "
                f"fills {len(ours)} here: send both engines the same prompt"
            )


def _of_regions(worker: Any, engine_id: str) -> Sequence[int]:
    """How many blocks the peer's regions have, where they have their own numbers (from 0.30)."""
    by_engine = getattr(worker, "dst_region_num_blocks", None) or {}
    return by_engine.get(engine_id) or ()


def _pairs_otherwise(worker: Any, engine_id: str) -> bool:
    """Whether the release pairs lists of other lengths: by region, or by context ranks."""
    theirs = (getattr(worker, "dst_region_group_ids", None) or {}).get(engine_id)
    ours = getattr(worker, "region_group_ids", None)
    if theirs and ours and list(theirs) != list(ours):
        return True
    info = getattr(getattr(worker, "transfer_topo", None), "get_engine_info", None)
    return info is not None and getattr(info(engine_id), "remote_dcp_size", 1) > 1
