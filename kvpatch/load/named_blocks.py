"""The blocks that a request names of a peer like us, held against what the peer has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpatch.core.errors import AS_ANSWERED, ReadRefused, UnlikePrompts
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load import read_request
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.reader import Reader
from kvpatch.worker.kv_cache_groups import tokens_of_group
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.speculative_decoding import reserves_slots


def leave_common_blocks(
    worker: Any, engine_id: str, request: ReadRequest, entry: Any, facts: ReleaseFacts
) -> None:
    """Takes those of P's blocks from a request that lie behind the tokens that D loads.

    P's prompt may be longer. The release pairs the lists of a peer like us from their ends.

    Raises:
        UnlikePrompts: P names fewer blocks than these tokens fill.
    """
    remote = read_request.groups(read_request.remote_blocks(entry, facts))
    release = ReleaseWorker(worker, facts)
    groups, contexts = release.groups(()), release.context_sizes
    is_met = engine_id in worker._remote_agents  # or hands are shaken now (from 0.32)
    drafts = facts.reserves_drafted_blocks and reserves_slots(worker.vllm_config)
    if drafts and not facts.counts_prefix_hits:  # 0.10.0
        return  # both lists may go on behind the prompt, and D's does not tell
    if not any(request.local_blocks) or max(contexts, default=1) > 1 or len(remote) != len(groups):
        return
    if not is_met or _pairs_otherwise(worker, engine_id, facts):
        return
    parts = worker._physical_blocks_per_logical_kv_block if facts.expands_remote_blocks else 1
    sizes = [_block_tokens(worker, number, facts) for number in range(len(groups))]
    #: By block size, the blocks of full attention behind these tokens: a window has as many.
    behind = dict.fromkeys(sizes, 0)
    for number, (group, block_tokens) in enumerate(zip(groups, sizes, strict=True)):
        if not group.spans_prompt or not request.local_blocks[number]:
            continue
        blocks = -(-request.tokens // block_tokens)
        if len(remote[number]) < blocks * parts:
            raise UnlikePrompts(
                f"the request names {len(remote[number]) // parts} blocks of engine {engine_id}, "
                f"and the prompt fills {blocks} here",
                "send both engines the same prompt",
            )
        if request.hit_tokens is not None:  # with those that D reserves for drafted tokens
            hit = request.hit_tokens // block_tokens
            blocks = max(blocks, hit + len(request.local_blocks[number]))
        behind[block_tokens] = max(behind[block_tokens], len(remote[number]) - blocks * parts)
    if any(behind.values()):
        kept = [
            blocks[: len(blocks) - behind[block_tokens]]
            if group.spans_prompt or group.window_tokens
            else blocks
            for group, blocks, block_tokens in zip(groups, remote, sizes, strict=True)
        ]
        read_request.replace_remote_blocks(entry, kept, facts)


def _block_tokens(worker: Any, number: int, facts: ReleaseFacts) -> int:
    """Returns the tokens of a block of one cache group, as the scheduler counts blocks."""
    if not facts.has_cache_groups:
        return int(worker.vllm_config.cache_config.block_size)
    return tokens_of_group(worker.kv_cache_config, facts, number)


def refuse_misnamed(
    worker: Any, reader: Reader, engine_id: str, entry: Any, facts: ReleaseFacts
) -> None:
    """Refuses blocks that the peer does not have, and fewer than are to be filled.

    The release reads the first from another layer's blocks, and asserts the second.

    Raises:
        ReadRefused: the request names the wrong blocks.
    """
    local = read_request.groups(read_request.local_blocks(entry, facts))
    is_met = engine_id in worker._remote_agents  # or hands are shaken now (from 0.32)
    blocks = worker.dst_num_blocks.get(engine_id) if is_met else None
    if blocks is None or not any(local) or _pairs_otherwise(worker, engine_id, facts):
        return
    remote = read_request.groups(read_request.remote_blocks(entry, facts))
    if len(remote) != len(local):
        raise ReadRefused(
            f"the request names blocks of {len(remote)} cache groups of engine {engine_id}, and "
            f"this model has {len(local)}",
            AS_ANSWERED,
        )
    if reader.has_state:  # pages of states are counted otherwise: the release's to judge
        return
    blocks = max((blocks, *_of_regions(worker, engine_id, facts)))
    parts = 1 if facts.expands_remote_blocks else reader.ours.kernel_blocks_per_block
    for theirs, ours in zip(remote, local, strict=True):
        last = max(theirs, default=0)
        if (last + 1) * parts > blocks:
            raise ReadRefused(
                f"the request names block {last} of engine {engine_id}, which has "
                f"{blocks // parts}",
                AS_ANSWERED,
            )
        if len(theirs) < len(ours):
            raise ReadRefused(
                f"the request names {len(theirs)} blocks of engine {engine_id}, and the prompt "
                f"fills {len(ours)} here",
                "send both engines the same prompt",
            )


def _of_regions(worker: Any, engine_id: str, facts: ReleaseFacts) -> Sequence[int]:
    """How many blocks the peer's regions have, where they have their own numbers (from 0.30)."""
    if "region_num_blocks" not in facts.agent_metadata:
        return ()
    return worker.dst_region_num_blocks.get(engine_id) or ()


def _pairs_otherwise(worker: Any, engine_id: str, facts: ReleaseFacts) -> bool:
    """Whether the release pairs lists of other lengths: by region, or by context ranks."""
    if "region_group_ids" in facts.agent_metadata:  # from 0.30
        theirs, ours = worker.dst_region_group_ids.get(engine_id), worker.region_group_ids
        if theirs and ours and list(theirs) != list(ours):
            return True
    if not facts.states_context_parallelism:
        return False
    return bool(worker.transfer_topo.get_engine_info(engine_id).remote_dcp_size > 1)
