"""The tokens that a request's blocks hold on both sides, per cache group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from kvpatch.core.errors import AS_ANSWERED, ReadRefused, UnexpectedRead, UnlikePrompts
from kvpatch.geometry.direct_plan import Plan
from kvpatch.geometry.overlap import Overlap
from kvpatch.geometry.segments import (
    BlockList,
    Segments,
    kernel_blocks,
    pair_blocks,
    uncovered_tail,
)
from kvpatch.geometry.staged_plan import Share
from kvpatch.load.read_request import ReadRequest
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import tokens_of
from kvpatch.peer.remote_ranks import RemoteStates
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.recurrent_state import StatePages


def shares_of(
    ours: LocalGeometry,
    groups: Sequence[Group],
    peer: AgentMetadata,
    overlaps: Sequence[Overlap],
    request: ReadRequest,
    block_tokens: Mapping[str, int] | None = None,
) -> tuple[Share, ...]:
    """Returns what to copy for a request from one rank of a peer.

    Refuses blocks that the peer does not have, that do not reach to the prompt's end, or that begin
    behind a sliding window's first token.

    Args:
        block_tokens: of the peer's kernel blocks by layer; None where all have what it states.
    """
    if request.tokens > request.remote_tokens:
        raise UnlikePrompts(
            f"the prompt has {request.tokens} tokens and the peer holds {request.remote_tokens}",
            "send both engines the same prompt",
        )
    stated, known = peer.block_tokens or ours.block_tokens, block_tokens or {}
    tokens = [next((known[n] for n in group.layers if n in known), stated) for group in groups]
    found = []
    for number, group in enumerate(groups):
        if not request.local_blocks[number] or group.has_state:
            continue
        remote = _remote_blocks(groups, peer, request, number, tokens)
        local = _local_blocks(ours, groups, request, number)
        start = _first_token(group, remote, local, request)
        if start < request.tokens > remote.end_token:
            raise UnlikePrompts(
                f"the request names blocks of engine {peer.engine_id} for {remote.end_token} "
                f"tokens, and the prompt has {request.tokens}",
                AS_ANSWERED,
            )
        segments = pair_blocks(remote, local, start, request.tokens)
        of_group = [overlap for overlap in overlaps if overlap.layer in group.layers]
        whole = tuple(overlap for overlap in of_group if overlap.is_whole)
        rows = tuple(overlap for overlap in of_group if not overlap.is_whole)
        if whole:
            found.append(Share(segments.in_whole_blocks(local.block_tokens), whole))
        if rows or not whole:
            found.append(Share(segments, rows))
    return tuple(found)


def state_pairs(
    groups: Iterable[Group], peer: AgentMetadata, request: ReadRequest
) -> Iterator[tuple[Group, int, int]]:
    """Yields each group with recurrent state, its remote and its local block, as ids count them.

    P names one block, or, where its prefix cache keeps states at blocks' ends (<= 0.26, and
    from 0.27 on in mode "all"), one for each of its blocks: null where it has let go of the
    state. Scratch for drafted tokens may follow either, which only a null block tells apart.
    """
    block_tokens = (peer.block_tokens or 1) * (peer.kernel_blocks_per_block or 1)
    for number, group in enumerate(groups):
        local, remote = request.local_blocks[number], request.remote_blocks[number]
        if not group.has_state or not local:
            continue
        found = state_block(remote, request.remote_tokens, block_tokens)
        if len(local) != 1 or found is None:
            raise ReadRefused(
                f"{len(local)} blocks of recurrent state are to be filled and P names "
                f"{sum(map(bool, remote))} in {len(remote)} places: expected one, with the state "
                "behind the prompt's tokens",
                "use --no-enable-prefix-caching (--mamba-cache-mode none) and no draft model on "
                "both sides",
            )
        yield group, found, local[0]


def state_block(named: Sequence[int], tokens: int, block_tokens: int) -> int | None:
    """Returns the block with the state behind a prompt's tokens; None where it is not known.

    Args:
        named: what P names of a group with recurrent state (:func:`state_pairs`).
        tokens: that P holds.
        block_tokens: of a block as ids count them.
    """
    found = named[-1:]
    if len(named) > 1:
        last = -(-tokens // block_tokens) - 1
        found = named[last : last + 1] if _NULL_BLOCK in named else ()
    return found[0] if any(found) else None


def filled_state(local: Sequence[int]) -> int | None:
    """Returns the block that a request's recurrent state goes to; None where there are several.

    Args:
        local: of a group with recurrent state; null where D's own prefix cache keeps none.
    """
    filled = [block for block in local if block != _NULL_BLOCK]
    return filled[0] if len(filled) == 1 else None


def loaded_tokens(
    ours: LocalGeometry, groups: Sequence[Group], request: ReadRequest
) -> Iterator[tuple[int, BlockList, int]]:
    """Yields the group, our blocks and the first token of all that a read fills whole."""
    for number, group in enumerate(groups):
        if request.local_blocks[number] and not group.has_state:
            local = _local_blocks(ours, groups, request, number)
            seen = request.tokens - group.window_tokens + 1 if group.window_tokens else 0
            yield number, local, max(local.first_token, seen)


def finished_blocks(
    ours: LocalGeometry, groups: Sequence[Group], tables: Sequence[Sequence[int]]
) -> Iterator[tuple[int, BlockList]]:
    """Yields the group and our blocks of a request that is over, by its tables from the first token
    on.
    """
    if len(tables) != len(groups):
        raise UnexpectedRead(f"{len(tables)} block tables of {len(groups)} groups")
    for number, (group, table) in enumerate(zip(groups, tables, strict=True)):
        if group.has_state:
            continue
        size, parts = _own_tokens(ours, group), ours.kernel_blocks_per_block
        yield number, window_end(table, size, parts, len(table))


def tails_of(
    ours: LocalGeometry, groups: Sequence[Group], request: ReadRequest
) -> Iterator[tuple[frozenset[str], Segments]]:
    """Yields layers, and what no transfer covers in their last blocks, where there is any."""
    for number, group in enumerate(groups):
        if request.local_blocks[number] and not group.has_state:
            tail = uncovered_tail(_local_blocks(ours, groups, request, number), request.tokens)
            if len(tail):
                yield group.layers, tail


def _first_token(group: Group, remote: BlockList, local: BlockList, request: ReadRequest) -> int:
    """Returns where to begin: in front of a window no token counts, and unlike blocks round it."""
    if not group.window_tokens:
        return local.first_token
    # The next token looks at itself and those before it.
    seen = request.tokens - group.window_tokens + 1
    if request.hit_tokens is not None and local.first_token > max(seen, request.hit_tokens):
        raise ReadRefused(
            f"the blocks that this engine named begin with token {local.first_token} of a prompt "
            f"of {request.tokens}, and the sliding window of {group.window_tokens} with {seen}: "
            "this vLLM leaves out blocks of windows where a draft model reserves some (0.23 to "
            "0.25)",
            "speculate without one, or use another release",
        )
    seen = max(local.first_token, seen)
    if remote.first_token > seen:
        raise UnlikePrompts(
            f"the prefill engine's blocks begin with token {remote.first_token} of a prompt of "
            f"{request.tokens}, and the sliding window of {group.window_tokens} with {seen}: it "
            "has let go of a block that is needed (its prompt is longer, or it runs vLLM <= 0.19, "
            "or <= 0.24 while it speculates)",
            "send both engines one prompt, use a later vLLM on P, or "
            "--disable-hybrid-kv-cache-manager on both sides",
        )
    return min(max(local.first_token, remote.first_token), request.tokens)


def _remote_blocks(
    groups: Sequence[Group],
    peer: AgentMetadata,
    request: ReadRequest,
    number: int,
    tokens: Sequence[int],
) -> BlockList:
    block_tokens = tokens[number]
    parts = peer.kernel_blocks_per_block or 1
    found = request.remote_blocks[number]
    size = block_tokens * parts
    held = -(-request.remote_tokens // size)
    if request.spare_slots is not None and groups[number].spans_prompt:
        most = -(-(request.remote_tokens + request.spare_slots) // size) + 1
        if len(found) > most:
            raise ReadRefused(
                f"the request names {len(found)} blocks of engine {peer.engine_id} for "
                f"{request.remote_tokens} tokens, which fill {held} of its blocks: it has been "
                "started again with another --block-size since it answered",
                "send the prompt to P again",
            )
    if groups[number].window_tokens:
        # Groups have equally many blocks, slots for drafted tokens included (<= 0.24),
        # and a window's list is the end of them. Where blocks are unlike nobody drafts.
        whole = [
            len(blocks)
            for group, blocks, size in zip(groups, request.remote_blocks, tokens, strict=True)
            if not (group.window_tokens or group.has_state) and size == block_tokens
        ]
        blocks = window_end(found, block_tokens, parts, max(whole, default=held))
    else:
        blocks = BlockList(kernel_blocks(found, parts), block_tokens)
    outside = blocks.block_ids[blocks.block_ids >= peer.blocks]
    if outside.size:
        raise ReadRefused(
            f"the request names blocks {outside[:3].tolist()} of engine {peer.engine_id}, which "
            f"has {peer.blocks}",
            AS_ANSWERED,
        )
    return blocks


#: What vLLM's block pool puts where a window has slid on.
_NULL_BLOCK = 0


def window_end(found: Sequence[int], block_tokens: int, parts: int, end_block: int) -> BlockList:
    """Returns the last blocks of a table that ends before block ``end_block``."""
    freed = next((i for i, block in enumerate(found) if block != _NULL_BLOCK), len(found))
    first = end_block - len(found) + freed
    if first < 0:
        raise ReadRefused(
            f"{len(found)} blocks in a window, and {end_block} in all of the prompt", AS_ANSWERED
        )
    return BlockList(
        kernel_blocks(found[freed:], parts), block_tokens, first * block_tokens * parts
    )


def _local_blocks(
    ours: LocalGeometry, groups: Sequence[Group], request: ReadRequest, number: int
) -> BlockList:
    """Returns our blocks, without those for tokens to be drafted."""
    found = request.local_blocks[number]
    found = found[: len(found) - _drafted_blocks(ours, groups, request)]
    block_tokens = _own_tokens(ours, groups[number])
    return blocks_to_end(found, request.tokens, block_tokens, ours.kernel_blocks_per_block)


def blocks_to_end(
    found: Sequence[int], tokens: int, block_tokens: int, parts: int = 1
) -> BlockList:
    """Returns blocks that end with a prompt's last token: their number tells where they start."""
    logical_tokens = block_tokens * parts
    first = (-(-tokens // logical_tokens) - len(found)) * logical_tokens
    if first < 0:
        raise UnexpectedRead(
            f"{len(found)} blocks of {logical_tokens} tokens for a prompt of {tokens}: expected no "
            "more than it fills"
        )
    return BlockList(kernel_blocks(found, parts), block_tokens, first)


def _own_tokens(ours: LocalGeometry, group: Group) -> int:
    if not ours.layers_differ_in_shape:
        return ours.block_tokens
    return min(tokens_of(ours.layers, group.layers & ours.layers.keys()))


def _drafted_blocks(ours: LocalGeometry, groups: Sequence[Group], request: ReadRequest) -> int:
    """Returns the blocks for tokens to be drafted, of which every group has as many (0.23, 0.24).

    They follow from the length of a group with full attention, which starts behind the hit.
    """
    if request.hit_tokens is None:
        return 0
    for group, blocks in zip(groups, request.local_blocks, strict=True):
        if blocks and not (group.window_tokens or group.has_state):
            logical_tokens = _own_tokens(ours, group) * ours.kernel_blocks_per_block
            needed = -(-request.tokens // logical_tokens) - request.hit_tokens // logical_tokens
            return max(0, len(blocks) - needed)
    return 0


def states_plan(
    groups: Iterable[Group],
    peer: AgentMetadata,
    request: ReadRequest,
    ours: Mapping[str, StatePages],
    theirs: Mapping[str, RemoteStates],
) -> Plan:
    """Returns the runs that bring each layer's states, as far as one rank of a peer has them."""
    runs = []
    for group, remote_block, local_block in state_pairs(groups, peer, request):
        for name in sorted(group.layers):
            remote, local = theirs[name].pages, ours[name]
            if remote_block >= remote.blocks or local_block >= local.blocks:
                raise ReadRefused(
                    f"the request names blocks {remote_block} and {local_block} of the states of "
                    f"layer {name}, of {remote.blocks} and {local.blocks}",
                    AS_ANSWERED,
                )
            there = remote.address + remote_block * remote.stride_bytes
            here = local.address + local_block * local.stride_bytes
            runs += [
                (there + run.remote_offset, here + run.local_offset, run.size_bytes)
                for run in theirs[name].runs
            ]
    return Plan(*np.asarray(runs, dtype=np.int64).reshape(-1, 3).T)
