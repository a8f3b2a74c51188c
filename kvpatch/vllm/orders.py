"""What a request needs from its peer, carried from the scheduler to the worker.

Pairing by token position needs the number of tokens, which only the scheduler
knows in most releases, and the peer's blocks in the peer's own size, which some
releases convert by our own before the worker can look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpatch.vllm.reader import Order

_ATTRIBUTE = "kvpatch_order"


def attach_orders(
    scheduler: Any, waiting: Mapping[str, Any], metadata: Any, *, full_blocks_only: bool
) -> None:
    """Writes each request's order onto its entry in the connector's metadata.

    Args:
        waiting: the scheduler's own record of requests to receive, by request id,
            taken before it was cleared; each value starts with the request.
        full_blocks_only: whether the release moves whole blocks of D only (0.10.0).
    """
    for request_id, entry in metadata.reqs_to_recv.items():
        request = waiting[request_id][0]
        prompt = int(request.num_prompt_tokens)
        parameters = request.kv_transfer_params or {}
        held = parameters.get("remote_num_tokens") or prompt  # stated from 0.21 on
        # A prefill engine that reads back an earlier turn wants what there is of it.
        tokens = min(prompt, held) if parameters.get("do_remote_decode") else prompt
        if full_blocks_only:
            tokens -= tokens % scheduler.block_size
        order = Order(tokens, held, groups(entry.local_block_ids), groups(remote_blocks(entry)))
        setattr(entry, _ATTRIBUTE, order)


def order_of(entry: Any) -> Order | None:
    """The order on an entry of the connector's metadata; None where there is none."""
    found = getattr(entry, _ATTRIBUTE, None)
    return found if isinstance(found, Order) else None


def engine_of(entry: Any) -> str:
    """The peer's engine id."""
    remote = getattr(entry, "remote", None)  # from 0.13
    return str(entry.remote_engine_id if remote is None else remote.engine_id)


def remote_blocks(entry: Any) -> Any:
    """The peer's blocks as the entry has them now."""
    remote = getattr(entry, "remote", None)
    return entry.remote_block_ids if remote is None else remote.block_ids


def pretend_alike(entry: Any, *, expanded: bool) -> None:
    """Gives the entry as many remote blocks as local ones, all of them block 0.

    The release pairs the two lists one to one; which bytes that means is ours.

    Args:
        expanded: whether kernel blocks are paired as they stand here, or logical
            ones that the release goes on to expand.
    """
    local = getattr(entry, "local_physical_block_ids", None) if expanded else None
    if local is None:
        local = entry.local_block_ids
    alike = _zeros(local)
    if getattr(entry, "remote", None) is None:
        entry.remote_block_ids = alike
    else:
        entry.remote.block_ids = alike


def groups(blocks: Any) -> tuple[tuple[int, ...], ...]:
    """Block ids per cache group; a flat list (to 0.17) is the only group's."""
    if len(blocks) and not hasattr(blocks[0], "__len__"):
        return (tuple(blocks),)
    return tuple(tuple(group) for group in blocks) or ((),)


def _zeros(blocks: Any) -> Any:
    if len(blocks) and hasattr(blocks[0], "__len__"):
        return type(blocks)([0] * len(group) for group in blocks)
    return [0] * len(blocks)
