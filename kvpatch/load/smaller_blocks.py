"""Peers of smaller blocks that the release reads itself, since no reader of ours can.

The release pairs blocks by their places in two lists. A list of D's begins behind a prefix hit and
one of P's with the prompt, so that the two belong together from the end, and they end in one place
only where the prompt fills D's last block. Handed P's blocks from D's first token on, the release
pairs them rightly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpatch.core.errors import ReadRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.segments import BlockList, kernel_blocks
from kvpatch.load import read_request
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.token_pairing import blocks_to_end, window_end
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

_ADVICE = "use one --block-size on both sides"


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


# --- which of P's blocks a request gets --------------------------------------------------------


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
            _ADVICE,
        )
    if shares_tokens(worker, read_request.engine_of(meta, facts), facts):
        # Here the release pairs blocks one to one, and leaves out the rest.
        has_more = any(len(theirs) > len(ours) for ours, theirs in zip(local, remote, strict=False))
        if any(meta.local_num_computed_blocks) or has_more:
            raise ReadRefused(
                "with context parallelism this vLLM pairs the peer's smaller blocks one to one "
                "with ours",
                _ADVICE,
            )
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
                _ADVICE,
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
