"""The choice of P's smaller blocks that a request gets, to be paired with D's by token.

The release pairs blocks by their places in two lists. A list of D's begins behind a prefix hit and
one of P's with the prompt, so that the two belong together from the end, and they end in one place
only where the prompt fills D's last block. Handed P's blocks from D's first token on, the release
pairs them rightly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvpatch.core.errors import ReadRefused
from kvpatch.geometry.segments import BlockList, kernel_blocks
from kvpatch.load import read_request
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.smaller_blocks import ADVICE, Blocks, shares_tokens
from kvpatch.load.token_pairing import blocks_to_end, window_end
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.state import worker_state


def remote_slice(
    local: BlockList, remote: BlockList, *, from_front: bool
) -> tuple[int, int] | None:
    """Returns the part of P's list that the release pairs with D's token by token; None for none.

    Args:
        from_front: True if it pairs lists of unlike lengths from the front (recurrent state and
            blocks cut into unlike parts), and not from the end.
    """
    before, held = local.first_token - remote.first_token, local.end_token - local.first_token
    if before < 0 or before % remote.block_tokens:
        return None
    start = before // remote.block_tokens
    stop = min(remote.block_ids.size, start - -held // remote.block_tokens)
    if stop <= start or ((stop - start) * remote.block_tokens > held and not from_front):
        return None
    return start, stop


def mend_pairing(
    worker: Any, meta: Any, groups: Sequence[Group], smaller: tuple[Blocks, Blocks | None]
) -> None:
    """Leaves those of P's blocks on a request that the release pairs with D's.

    Args:
        smaller: our blocks and P's, of which nobody may know into what they are cut.

    Raises:
        ReadRefused: there are none such.
    """
    facts, (ours, theirs) = worker_state(worker).facts, smaller
    local, remote = map(
        read_request.groups, (meta.local_block_ids, read_request.remote_blocks(meta, facts))
    )
    if not any(local):
        return
    if theirs is None:
        raise ReadRefused(
            "this release's handshake does not say into what the peer's blocks are cut, and ours "
            "are",
            ADVICE,
        )
    if shares_tokens(worker, read_request.engine_of(meta, facts), facts):
        _refuse_unlike_shares(meta, local, remote)
        return
    request, has_state = read_request.read_request_of(meta), any(one.has_state for one in groups)
    is_cached = bool(worker.vllm_config.cache_config.enable_prefix_caching)
    kept = list(remote)
    for number, group in enumerate(groups):
        if group.has_state or not local[number]:
            continue
        has = _remote_list(group, request, remote[number], theirs)
        hit = None if is_cached else 0
        if request is not None and is_cached:
            hit = request.hit_tokens
        if hit is not None and not group.window_tokens:
            first = hit // ours.tokens * ours.tokens
            wanted = BlockList(kernel_blocks(local[number], 1), ours.tokens, first)
        else:
            tokens = _tokens_of(has, ours, has_state) if request is None else request.tokens
            wanted = blocks_to_end(local[number], tokens, ours.tokens)
        found = remote_slice(wanted, has, from_front=ours.parts != theirs.parts and has_state)
        if found is None:
            raise ReadRefused(
                f"this vLLM would pair the {len(remote[number])} blocks of {theirs.tokens} tokens "
                f"with the wrong ones of our {len(local[number])} of {ours.tokens}",
                ADVICE,
            )
        kept[number] = tuple(has.block_ids[slice(*found)].tolist())
    if tuple(kept) != remote:
        read_request.replace_remote_blocks(meta, kept, facts)


def _remote_list(
    group: Group, request: ReadRequest | None, named: Sequence[int], theirs: Blocks
) -> BlockList:
    """Returns P's list, without blocks that slid out of a window."""
    if not group.window_tokens:
        return BlockList(kernel_blocks(named, 1), theirs.tokens)
    if request is None:
        raise _no_count()
    return window_end(named, theirs.tokens, 1, -(-request.remote_tokens // theirs.tokens))


def _tokens_of(remote: BlockList, ours: Blocks, has_state: bool) -> int:  # noqa: FBT001
    """Returns up to where P's list reaches, where that tells how many of D's blocks it fills."""
    last = remote.end_token
    # P may leave out the last token of a model with recurrent state.
    least = last - remote.block_tokens + (not has_state)
    if -(-least // ours.tokens) != -(-last // ours.tokens):
        raise _no_count()
    return last


def _no_count() -> ReadRefused:
    return ReadRefused(
        "the request reads from blocks of another size and carries no token count",
        "set ENABLE_KVPATCH for the scheduler's process too",
    )


def _refuse_unlike_shares(
    meta: Any, local: Sequence[Sequence[int]], remote: Sequence[Sequence[int]]
) -> None:
    """Refuses unlike lists: here the release pairs blocks one to one, and leaves out the rest."""
    has_hit = any(meta.local_num_computed_blocks)
    if has_hit or any(len(theirs) > len(ours) for ours, theirs in zip(local, remote, strict=False)):
        raise ReadRefused(
            "with context parallelism this vLLM pairs the peer's smaller blocks one to one with "
            "ours",
            ADVICE,
        )


def name_preparable(
    worker: Any, meta: Any, groups: Sequence[Group], smaller: tuple[Blocks, Blocks | None]
) -> None:
    """Names as many times block 0 as have the release prepare a transfer, which is to fail."""
    facts, (ours, theirs) = worker_state(worker).facts, smaller
    ratio = 1.0 if theirs is None else ours.tokens / theirs.tokens
    is_shared = shares_tokens(worker, read_request.engine_of(meta, facts), facts)
    named = []
    for group, local in zip(groups, read_request.groups(meta.local_block_ids), strict=True):
        length = len(local) if group.has_state else math.ceil(len(local) * ratio)
        if is_shared:
            in_front = max(meta.local_num_computed_blocks, default=0) + 1
            length = (length + in_front) * worker.dcp_size
        named.append([0] * length)
    read_request.replace_remote_blocks(meta, named, facts)
