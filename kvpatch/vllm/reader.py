"""One worker's reads from peers of another geometry.

The release goes on doing what it does for a peer like us: handshakes, books,
notifications, completion, failures. Only the transfer that it prepares is
another one, planned between the two geometries: the call that prepares it,
``make_prepped_xfer``, is the same in every release from 0.10.0 on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import wrapt

from kvpatch._errors import KvpatchError
from kvpatch.geometry import (
    BlockList,
    Plan,
    Plane,
    kernel_blocks,
    missing_heads,
    pair_blocks,
    plan_copy,
    uncovered_tail,
)
from kvpatch.transfer.reads import post_read
from kvpatch.transfer.zeros import zero_tokens
from kvpatch.vllm.groups import Group
from kvpatch.vllm.peers import OurSide
from kvpatch.vllm.wire import PeerRefused, Statement


class ReadRefused(KvpatchError):
    """A request whose blocks do not hold the tokens that it needs."""


@dataclass(frozen=True)
class Order:
    """What a request needs from its peer, as the scheduler knew it.

    Attributes:
        tokens: how many tokens of the prompt both sides hold in the end.
        remote_tokens: how many the peer holds; its blocks end with the last of them.
        local_blocks: per cache group, the blocks to fill, without those of a prefix hit.
        remote_blocks: per cache group, the peer's blocks, in the peer's own size.
    """

    tokens: int
    remote_tokens: int
    local_blocks: tuple[tuple[int, ...], ...]
    remote_blocks: tuple[tuple[int, ...], ...]


@dataclass
class Peer:
    """A peer of another geometry: what its ranks stated, where they lie, who they are."""

    statements: dict[int, Statement] = field(default_factory=dict)
    planes: dict[int, tuple[Plane, ...]] = field(default_factory=dict)
    agents: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Reading:
    engine_id: str
    peer: Peer
    order: Order


class Reader:
    """State of one worker; :func:`reader_of` finds it."""

    def __init__(
        self, ours: OurSide, groups: tuple[Group, ...], tensors: Mapping[str, Any]
    ) -> None:
        self.ours = ours
        self.groups = groups
        self.peers: dict[str, Peer] = {}
        self._tensors = tensors
        self._reading: _Reading | None = None
        self._tails_left = False

    def peer(self, engine_id: str) -> Peer | None:
        """The peer of that engine id, if it is one of another geometry."""
        return self.peers.get(engine_id)

    @contextmanager
    def reading(self, engine_id: str, peer: Peer, order: Order) -> Iterator[None]:
        """While inside, transfers that the release prepares are replaced by ours."""
        self._reading = _Reading(engine_id, peer, order)
        self._tails_left = True
        try:
            yield
        finally:
            self._reading = None

    def prepare(self, nixl: Any, rank: int, notification: bytes) -> Any:
        """The transfer that replaces the release's own, of one rank of the peer."""
        reading = self._reading
        if reading is None:
            raise ReadRefused("a transfer was prepared outside a request")
        plan = self.plan(reading.peer, rank, reading.order)
        if self._tails_left:  # once a request, and not before its blocks were checked
            self._zero_tails(reading.order)
            self._tails_left = False
        statement = reading.peer.statements[rank]
        remote = replace(self.ours.memory, device_id=statement.device_id)
        agent = reading.peer.agents[rank]
        return post_read(nixl, plan, self.ours.memory, remote, agent, notification)

    def is_reading(self) -> str | None:
        """The engine that is being read from; None outside :meth:`reading`."""
        return None if self._reading is None else self._reading.engine_id

    def plan(self, peer: Peer, rank: int, order: Order) -> Plan:
        """Every byte that one rank of the peer holds for the request.

        Raises:
            UnpairableBlocks: the blocks do not hold the tokens.
            PeerRefused: a head of ours is on none of the peer's ranks.
        """
        if order.tokens > order.remote_tokens:
            raise ReadRefused(
                f"the prompt has {order.tokens} tokens and the peer holds {order.remote_tokens}: "
                "send both engines the same prompt"
            )
        local = [plane for layer in self.ours.layers.values() for plane in layer.planes]
        held = [plane for planes in peer.planes.values() for plane in planes]
        missing = missing_heads(held, local)
        if missing:
            layer, content, head = missing[0]
            raise PeerRefused(
                f"no rank of engine {peer.statements[rank].engine_id} that we read from holds "
                f"{content.value} head {head} of layer {layer}"
            )
        plans = []
        for number, group in enumerate(self.groups):
            if not order.local_blocks[number]:
                continue
            remote, ours = self._block_lists(peer.statements[rank], order, number)
            # Before the window nobody looks; the two may round it to unlike blocks.
            first = ours.first_token
            start = max(first, remote.first_token) if group.window else first
            segments = pair_blocks(remote, ours, start, order.tokens)
            theirs = [p for p in peer.planes[rank] if p.layer in group.layers]
            mine = [p for p in local if p.layer in group.layers]
            plans.append(plan_copy(segments, theirs, mine, partial_heads=True))
        return _joined(plans)

    def _block_lists(
        self, peer: Statement, order: Order, group: int
    ) -> tuple[BlockList, BlockList]:
        block_tokens = peer.block_tokens or self.ours.block_tokens
        remote = _block_list(
            order.remote_blocks[group],
            block_tokens,
            peer.kernel_blocks_per_block or 1,
            order.remote_tokens,
            from_end=self.groups[group].window,
        )
        local = self._local_blocks(order, group)
        outside = [b for b in remote.block_ids.tolist() if b >= peer.blocks]
        if outside:
            raise ReadRefused(
                f"the request names blocks {outside[:3]} of engine {peer.engine_id}, which has "
                f"{peer.blocks}"
            )
        return remote, local

    def _local_blocks(self, order: Order, group: int) -> BlockList:
        ours = self.ours
        return _block_list(
            order.local_blocks[group],
            ours.block_tokens,
            ours.kernel_blocks_per_block,
            order.tokens,
            from_end=True,
        )

    def _zero_tails(self, order: Order) -> None:
        for number, group in enumerate(self.groups):
            if not order.local_blocks[number]:
                continue
            tail = uncovered_tail(self._local_blocks(order, number), order.tokens)
            if not len(tail):
                continue
            for name in group.layers:
                for plane in self.ours.layers[name].planes:
                    zero_tokens(self._tensors[name], plane, tail)


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


def _joined(plans: list[Plan]) -> Plan:
    import numpy as np

    if len(plans) == 1:
        return plans[0]
    columns = ("remote_address", "local_address", "length", "zero_address", "zero_length")
    return Plan(*(np.concatenate([getattr(p, name) for p in plans]) for name in columns))


class ReadingAgent(wrapt.ObjectProxy[Any]):
    """A worker's NIXL agent, whose prepared reads are ours while the reader reads."""

    def __init__(self, agent: Any, reader: Reader, rank_of: Any) -> None:
        super().__init__(agent)
        self._self_reader = reader
        self._self_rank_of = rank_of

    def make_prepped_xfer(
        self,
        operation: str,
        local_handle: Any,
        local_indices: Any,
        remote_handle: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As NIXL's own; the descriptors that are named are not the ones that are read."""
        engine_id = self._self_reader.is_reading()
        if engine_id is None:
            return self.__wrapped__.make_prepped_xfer(
                operation,
                local_handle,
                local_indices,
                remote_handle,
                remote_indices,
                notif_msg,
                *args,
                **kwargs,
            )
        rank = self._self_rank_of(engine_id, remote_handle)
        return self._self_reader.prepare(self.__wrapped__, rank, notif_msg)


_READERS: WeakKeyDictionary[Any, Reader] = WeakKeyDictionary()


def reader_of(worker: Any) -> Reader | None:
    """The worker's reader; None before it has registered its caches."""
    return _READERS.get(worker)


def attach(worker: Any, reader: Reader) -> None:
    """Gives a worker its reader; registering again gives it a new one."""
    _READERS[worker] = reader
