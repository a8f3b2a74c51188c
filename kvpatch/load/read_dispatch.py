"""A request to read from a peer: whose transfers it is read by, or why it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvpatch.core.errors import (
    AS_ANSWERED,
    KvpatchError,
    ReadRefused,
    UnexpectedRead,
    UnlikePrompts,
)
from kvpatch.core.proxies import replaced
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load import read_request
from kvpatch.load.mapped_pages import MappedPages, refuse_unmapped
from kvpatch.load.read_request import ReadRequest, ReorderedLoads
from kvpatch.load.reader import Reader, RequestContext
from kvpatch.load.smaller_blocks import (
    Blocks,
    mend_pairing,
    name_preparable,
    shares_tokens,
    smaller_blocks,
)
from kvpatch.worker.kv_cache_groups import reserves_slots, tokens_of_group, transferred_groups
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import release_worker, worker_state


@contextmanager
def request_read(worker: Any, request_id: str, meta: Any) -> Iterator[None]:
    """While inside, the release prepares a request's transfers, and they are what they must be."""
    state = worker_state(worker)
    reader, facts = state.held(Reader), state.facts
    read_request.restore_remote_blocks(meta, facts)
    engine_id, request = read_request.engine_of(meta, facts), read_request.read_request_of(meta)
    context = RequestContext(request_id, engine_id, request)
    smaller = smaller_blocks(worker, engine_id, facts)
    with ExitStack() as inside:
        if reader is not None and request is not None:
            if request.is_read_back:  # else P states null, and typed proxies 0.0
                context.expires = read_request.stated_end(worker, engine_id, meta, facts)
            if reader.check_makers:
                context.is_as_read = smaller is None and not _is_remade(worker, engine_id)
                for check_load in reader.check_makers:
                    check_load(context, request)
        if reader is not None:
            inside.enter_context(replaced(reader, context=context))
        try:
            if context.refusal is None:
                _choose(worker, meta, context, smaller)
        except KvpatchError as error:
            context.refusal = error
        if context.refusal is not None:
            if smaller is None:
                # Of a like peer whose lists, of other lengths, the release alone pairs, they stay:
                # where they are of one length it may find nothing to read for this rank, prepare no
                # transfer, and take a load that is refused for one that is done.
                is_met = engine_id in worker._remote_agents
                is_like = is_met and (reader is None or engine_id not in reader.peers)
                if not (is_like and _pairs_otherwise(worker, engine_id, facts)):
                    read_request.match_local_block_count(meta, facts)
            else:
                context.is_of_smaller = True
                name_preparable(worker, meta, release_worker(worker).groups(()), smaller)
            if reader is None:
                from kvpatch.load.nixl_proxy import RefusingAgent

                agent = RefusingAgent(worker, context, context.refusal)
                inside.enter_context(replaced(worker, nixl_wrapper=agent))
        yield


def _is_remade(worker: Any, engine_id: str) -> bool:
    """True if the release makes its own of a peer's blocks behind the reads, as of smaller ones.

    It permutes those of all peers once it was told to (from 0.11.1), and reorders those of another
    backend for a CPU's (from 0.20).
    """
    permutes = bool(getattr(worker, "enable_permute_local_kv", False))
    return permutes or engine_id in worker_state(worker).of(ReorderedLoads).peers


def _choose(
    worker: Any, meta: Any, context: RequestContext, smaller: tuple[Blocks, Blocks | None] | None
) -> None:
    """Names the blocks that the release pairs rightly, or has kvpatch read the request.

    Raises:
        KvpatchError: neither can be; the load fails.
    """
    state, engine_id, request = worker_state(worker), context.engine_id, context.request
    reader, facts, is_known = state.held(Reader), state.facts, engine_id in worker._remote_agents
    fills = request is not None and any(request.local_blocks)
    if reader is not None and request is not None and is_known:
        parts = reader.ours.kernel_blocks_per_block
        refuse_unmapped(state.held(MappedPages), reader.groups, request, parts)
    if smaller is not None:
        mend_pairing(worker, meta, release_worker(worker).groups(()), smaller)
        return
    peer = None if reader is None else reader.peers.get(engine_id)
    if peer is not None:  # its blocks are paired by token, which tells wrong ones
        if request is None:
            raise ReadRefused(
                f"request {context.request_id} reads from engine {engine_id} of another geometry "
                "and carries no token count",
                "set ENABLE_KVPATCH for the scheduler's process too",
            )
        if fills:  # else a full prefix hit or an abort, of which the release tells P
            read_request.match_local_block_count(meta, facts)
            context.peer = peer
        return
    # One like us; or one that hands are shaken with now (from 0.32), and the request comes again.
    if reader is not None and is_known and state.is_host_buffered and fills:
        raise UnexpectedRead(
            f"request {context.request_id} reads from engine {engine_id}, which has not shaken "
            "hands with the host buffer's reader"
        )
    names_any = any(read_request.groups(meta.local_block_ids))
    if not (is_known and names_any):
        return
    if _pairs_otherwise(worker, engine_id, facts):
        if request is not None:
            _refuse_part_of_unlike_regions(worker, engine_id, request, meta, facts)
        return
    if request is not None:
        leave_common_blocks(worker, engine_id, request, meta, facts)
    if reader is not None:
        refuse_misnamed(worker, reader, engine_id, meta, facts)


def leave_common_blocks(
    worker: Any, engine_id: str, request: ReadRequest, entry: Any, facts: ReleaseFacts
) -> None:
    """Takes those of P's blocks from a request that lie behind the tokens that D loads.

    P's prompt may be longer. The release pairs the lists of a peer like us from their ends.
    """
    remote = read_request.groups(read_request.remote_blocks(entry, facts))
    release = ReleaseWorker(worker, facts)
    groups, contexts = release.groups(()), release.context_sizes
    drafts = facts.reserves_drafted_blocks and reserves_slots(worker.vllm_config)
    if drafts and not facts.counts_prefix_hits:  # 0.10.0
        return  # both lists may go on behind the prompt, and D's does not tell
    if not any(request.local_blocks) or max(contexts, default=1) > 1 or len(remote) != len(groups):
        return
    parts = worker._physical_blocks_per_logical_kv_block if facts.expands_remote_blocks else 1
    sizes = [int(worker.vllm_config.cache_config.block_size)]
    if facts.has_cache_groups:  # as the scheduler counts blocks
        plan = worker.kv_cache_config
        sizes = [tokens_of_group(plan, facts, number) for number in range(len(groups))]
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


def refuse_misnamed(
    worker: Any, reader: Reader, engine_id: str, entry: Any, facts: ReleaseFacts
) -> None:
    """Refuses blocks that the peer does not have, and fewer than are to be filled.

    The release reads the first from another layer's blocks, and asserts the second.
    """
    local = read_request.groups(read_request.local_blocks(entry, facts))
    blocks = worker.dst_num_blocks.get(engine_id)
    if blocks is None:
        return
    remote = read_request.groups(read_request.remote_blocks(entry, facts))
    if len(remote) != len(local):
        raise ReadRefused(
            f"the request names blocks of {len(remote)} cache groups of engine {engine_id}, and "
            f"this model has {len(local)}",
            AS_ANSWERED,
        )
    if reader.states:  # pages of states are counted otherwise: the release's to judge
        return
    if "region_num_blocks" in facts.agent_metadata:  # regions with numbers of their own, from 0.30
        blocks = max((blocks, *(worker.dst_region_num_blocks.get(engine_id) or ())))
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


def _refuse_part_of_unlike_regions(
    worker: Any, engine_id: str, request: ReadRequest, entry: Any, facts: ReleaseFacts
) -> None:
    """Refuses a part of P's prompt where the release would pair lists by region from their ends.

    It pairs them by token only with P's own count, and without regions that groups share.
    """
    if not _has_unlike_regions(worker, engine_id, facts):
        return
    plan, tokens = worker.kv_cache_config, (request.tokens, request.remote_tokens)
    groups = range(len(transferred_groups(plan, facts)))
    sizes = {tokens_of_group(plan, facts, number) for number in groups}
    if all(len({-(-count // block_tokens) for count in tokens}) == 1 for block_tokens in sizes):
        return
    regions = (*worker.dst_region_group_ids[engine_id], *worker.region_group_ids)
    if (
        entry.remote.num_tokens is None
        or min(regions) < 0
        or shares_tokens(worker, engine_id, facts)
    ):
        raise UnlikePrompts(
            f"{request.tokens} of {request.remote_tokens} tokens of engine {engine_id} are to be "
            "loaded, whose layers are in other cache groups than ours: this vLLM would take the "
            "last blocks",
            "send both engines the same prompt, and pass on remote_num_tokens of P's answer",
        )


def _has_unlike_regions(worker: Any, engine_id: str, facts: ReleaseFacts) -> bool:
    """True if a peer's regions are of other cache groups than ours (from 0.30)."""
    if "region_group_ids" not in facts.agent_metadata:
        return False
    theirs, ours = worker.dst_region_group_ids.get(engine_id), worker.region_group_ids
    return bool(theirs and ours and list(theirs) != list(ours))


def _pairs_otherwise(worker: Any, engine_id: str, facts: ReleaseFacts) -> bool:
    """True if the release pairs lists of other lengths: by region, or by context ranks."""
    is_unlike = _has_unlike_regions(worker, engine_id, facts)
    return is_unlike or shares_tokens(worker, engine_id, facts)
