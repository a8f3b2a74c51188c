"""What a request's blocks hold on both sides, per cache group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpatch._errors import KvpatchError
from kvpatch.geometry import (
    BlockList,
    Crossing,
    Segments,
    Share,
    kernel_blocks,
    pair_blocks,
    uncovered_tail,
)
from kvpatch.vllm.groups import Group
from kvpatch.vllm.orders import Order
from kvpatch.vllm.peers import OurSide
from kvpatch.vllm.wire import Statement


class ReadRefused(KvpatchError):
    """A request whose blocks do not hold the tokens that it needs."""


def shares_of(
    ours: OurSide,
    groups: Sequence[Group],
    peer: Statement,
    crossings: Sequence[Crossing],
    order: Order,
) -> tuple[Share, ...]:
    """What to copy for a request from one rank of a peer.

    Raises:
        ReadRefused: the request names blocks that the peer does not have, or more than
            its tokens fill.
        UnpairableBlocks: the blocks do not hold the tokens.
    """
    if order.tokens > order.remote_tokens:
        raise ReadRefused(
            f"the prompt has {order.tokens} tokens and the peer holds {order.remote_tokens}: "
            "send both engines the same prompt"
        )
    found = []
    for number, group in enumerate(groups):
        if not order.local_blocks[number]:
            continue
        remote = _remote_blocks(ours, group, peer, order, number)
        local = _local_blocks(ours, order, number)
        # Before the window nobody looks; the two may round it to unlike blocks.
        first = local.first_token
        start = max(first, remote.first_token) if group.window else first
        segments = pair_blocks(remote, local, start, order.tokens)
        found.append(
            Share(segments, tuple(found for found in crossings if found.layer in group.layers))
        )
    return tuple(found)


def tails_of(
    ours: OurSide, groups: Sequence[Group], order: Order
) -> Iterator[tuple[frozenset[str], Segments]]:
    """(layers, what no transfer covers in their last blocks), where there is any."""
    for number, group in enumerate(groups):
        if order.local_blocks[number]:
            tail = uncovered_tail(_local_blocks(ours, order, number), order.tokens)
            if len(tail):
                yield group.layers, tail


def _remote_blocks(
    ours: OurSide, group: Group, peer: Statement, order: Order, number: int
) -> BlockList:
    blocks = _block_list(
        order.remote_blocks[number],
        peer.block_tokens or ours.block_tokens,
        peer.kernel_blocks_per_block or 1,
        order.remote_tokens,
        from_end=group.window,
    )
    outside = [b for b in blocks.block_ids.tolist() if b >= peer.blocks]
    if outside:
        raise ReadRefused(
            f"the request names blocks {outside[:3]} of engine {peer.engine_id}, which has "
            f"{peer.blocks}"
        )
    return blocks


def _local_blocks(ours: OurSide, order: Order, number: int) -> BlockList:
    return _block_list(
        order.local_blocks[number],
        ours.block_tokens,
        ours.kernel_blocks_per_block,
        order.tokens,
        from_end=True,
    )


def _block_list(
    blocks: tuple[int, ...], block_tokens: int, parts: int, tokens: int, *, from_end: bool
) -> BlockList:
    """A request's blocks as kernel blocks, placed by the tokens that they hold.

    A list that ends with the last token tells where it starts by its length.
    """
    logical_tokens = block_tokens * parts
    first = 0
    if from_end:
        first = (-(-tokens // logical_tokens) - len(blocks)) * logical_tokens
        if first < 0:
            raise ReadRefused(
                f"{len(blocks)} blocks of {logical_tokens} tokens for a prompt of {tokens}: "
                "expected no more than it fills"
            )
    return BlockList(kernel_blocks(blocks, parts), block_tokens, first)
