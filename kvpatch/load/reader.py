"""One worker's reads from peers of another geometry.

The release goes on doing what it does for a peer like us: handshakes, books,
notifications, completion, failures. Only the transfer that it prepares is
another one, planned between the two geometries: the call that prepares it,
``make_prepped_xfer``, is the same in every release from 0.10.0 on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpatch.core.errors import (
    AS_ANSWERED,
    KvpatchError,
    PeerRefused,
    ReadRefused,
    UnexpectedRead,
    UnlikePrompts,
    UnpairableBlocks,
)
from kvpatch.core.recent_engines import RecentEngines
from kvpatch.geometry.cross_layer_blocks import pair_whole_blocks
from kvpatch.geometry.direct_plan import Plan, plan_parts
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.plane_heads import HeadName
from kvpatch.geometry.segments import Int64Array, Segments, kernel_blocks
from kvpatch.geometry.staged_plan import Share
from kvpatch.load.chosen_ways import ChosenWays
from kvpatch.load.prepared_transfers import CheckLoad, RankRead, Reading, RequestContext
from kvpatch.load.read_factory import Progress, ReadFactory, Wanted
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.state_runs import states_plan
from kvpatch.load.token_pairing import shares_of, state_pairs, tails_of
from kvpatch.observe.book import Book
from kvpatch.observe.catalogue import Way
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.cross_layer_blocks import RegisteredCrossLayerBlocks
from kvpatch.peer.remote_planes import peer_memory
from kvpatch.peer.remote_ranks import Peer, RemoteRank
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.checked_transfer import CheckedTransfer
from kvpatch.transfer.lifetime import Lease, Leases, Lifetime
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.own_read import OwnRead
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.transfer.storageless import StoragelessCaches
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.recurrent_state import StatePages
from kvpatch.worker.registered_caches import LayerCache

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.unlike_engines")

#: Failed checks that nobody has taken; where nobody does the oldest go.
_MOST_FAILED = 65536


@dataclass(frozen=True)
class Destination:
    """What reads fill.

    Attributes:
        tensors: where they are placed.
        layers: of `tensors`, where the release was shown others: a host buffer of the same
            layout and other blocks, or what stands for cross-layer blocks; None where it was
            `tensors`.
        cross_layer: what is registered, where blocks are cross-layer blocks.
        caches: what places reads where `tensors` only stand for those of the device.
        states: the pages of layers with recurrent state, where they really lie.
    """

    tensors: Mapping[str, torch.Tensor]
    layers: Mapping[str, LayerCache] | None = None
    cross_layer: RegisteredCrossLayerBlocks | None = None
    caches: Caches | StoragelessCaches | None = None
    states: Mapping[str, StatePages] = field(default_factory=dict)


def _as_it_is(_: str, message: bytes) -> bytes | None:
    return message


class Reader:
    """What one worker reads from its peers.

    Args:
        pool: where staged reads land.
        mode: ``auto``, ``direct`` or ``staged``.
        progress: what reads go on in between the engine's steps; None for the steps alone.

    Attributes:
        ways: what goes straight to its place, and what through the pool.
        leases: how long peers keep what is to be read.
        to_engine: (engine id, message) -> the message in that engine's words, None for none.
        to_agent: (NIXL's name of a rank, message) -> the same.
        masks: by NIXL's name of a rank, what hides its addresses in P's answers.
        check_makers: give each load what makes the checks of its reads.
        pooled: what reads through the pool are called in the metrics.
        book: of its worker.
        failed_checks: names of requests whose loads a check has failed, on whatever thread.
    """

    def __init__(
        self,
        ours: LocalGeometry,
        groups: tuple[Group, ...],
        destination: Destination,
        pool: StagingPool,
        mode: str,
        progress: Progress | None = None,
    ) -> None:
        self.ours = ours
        self.groups = groups
        self.destination = destination
        self.pool = pool
        self.peers: dict[str, Peer] = {}
        self._unbooked: frozenset[str] = frozenset()
        self.mode = mode
        tensors, caches = destination.tensors, destination.caches
        self._cross_layer = destination.cross_layer
        self._layers = ours.layers if destination.layers is None else destination.layers
        if caches is None:  # states move whole, and in releases <= 0.26 are lists of tensors
            caches = Caches({name: tensors[name] for name in self._layers})
        if progress is not None and isinstance(caches, Caches):
            caches.thread = progress.thread.copying
        self._caches = caches
        self._reads = ReadFactory(pool, caches, progress)
        self.ways = ChosenWays(mode, pool, caches.device, progress)
        self.planes = [plane for layer in self._layers.values() for plane in layer.planes]
        self.context: RequestContext | None = None
        self._states = destination.states
        self.leases = Leases()
        self.to_engine: Callable[[str, bytes], bytes | None] = _as_it_is
        self.to_agent: Callable[[str, bytes], bytes | None] = _as_it_is
        self.masks: RecentEngines[int] = RecentEngines()
        self.check_makers: tuple[CheckLoad, ...] = ()
        self.pooled = Way.STAGED
        self.book = Book()
        self.failed_checks: deque[str] = deque(maxlen=_MOST_FAILED)

    def peer(self, engine_id: str) -> Peer | None:
        """The peer of that engine id, if it is one of another geometry."""
        return self.peers.get(engine_id)

    def keep(self, booked: Collection[str]) -> None:
        """Forgets the engines that the release has let go of, or never took on.

        It books an engine when all ranks have shaken hands, so that one that is on its way is not
        booked either: those are forgotten that are not at two handshakes of others.

        Args:
            booked: the engines that the release knows, and the one that hands are shaken with.
        """
        unbooked = frozenset(self.peers).difference(booked)
        for engine_id in unbooked & self._unbooked:
            self.peers.pop(engine_id, None)
        self._unbooked = unbooked

    def admit(self, rank: RemoteRank) -> None:
        """Books a rank that the release has admitted; another number of ranks begins anew."""
        self._book(self.peers, rank)
        self.ways.measure(self.ours.memory)

    def admit_like(self, engine_id: str) -> None:
        """Books a rank of a peer like us, which the release reads."""
        self.peers.pop(engine_id, None)

    def _book(self, peers: dict[str, Peer], rank: RemoteRank) -> None:
        metadata = rank.metadata
        peer = peers.get(metadata.engine_id)
        if peer is None or any(
            known.metadata.tp_size != metadata.tp_size for known in peer.ranks.values()
        ):
            peer = peers[metadata.engine_id] = Peer()
        peer.add(rank, self.planes)

    @property
    def thread(self) -> ProgressThread | None:
        """What reads go on in between the engine's steps; None for the steps alone."""
        return None if self._reads.progress is None else self._reads.progress.thread

    @property
    def has_state(self) -> bool:
        """Whether some of our layers have recurrent state."""
        return bool(self._states)

    @property
    def is_for_all(self) -> bool:
        """Whether peers like us are read by us too: the release does not know our tensors."""
        return self._layers is not self.ours.layers

    @property
    def reads_all(self) -> bool:
        """Whether peers like us are read by us for any reason."""
        return self.is_for_all or self.ours.misreads_blocks

    @contextmanager
    def request(self, context: RequestContext) -> Iterator[None]:
        """While inside, transfers that the release prepares are what a context makes of them."""
        self.context = context
        try:
            yield
        finally:
            self.context = None

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """While inside, what is refused is booked, of a request that reads many ranks once."""
        try:
            yield
        except KvpatchError as error:
            context = self.context
            if context is None or not context.is_refused:
                self.book.refuse(error)
            if context is not None:
                context.is_refused = True
                if isinstance(error, UnlikePrompts | UnpairableBlocks):
                    self.failed_checks.append(context.request_id)
            raise

    def is_reading(self) -> str | None:
        """The engine that we read from; None outside a request, and where the release reads."""
        context = self.context
        return None if context is None or context.reading is None else context.engine_id

    def prepare(self, nixl: Any, number: int, notification: bytes) -> OwnRead:
        """The transfer that replaces the release's own, of one rank of the peer.

        Raises:
            ReadRefused, UnpairableBlocks: the blocks do not hold the tokens.
            PeerRefused: a head of ours is on none of the peer's ranks.
        """
        reading = self._being_read()
        if reading.peer.missing is not None:
            raise PeerRefused(
                f"no rank of engine {self.is_reading()} that we read from holds "
                f"{reading.peer.missing}",
                "use one model, one --tensor-parallel-size and one --pipeline-parallel-size on "
                "both sides",
            )
        rank = reading.peer.ranks[number]
        metadata = rank.metadata
        rest = rank.behind(reading.taken_before(rank), self.planes)
        shares = shares_of(
            self.ours, self.groups, metadata, rest.overlaps, reading.request, rank.block_tokens
        )
        ends = Ends(
            self.ours.memory, peer_memory(self.ours, metadata), rank.agent, metadata.engine_id
        )
        states = partial(
            states_plan, self.groups, metadata, reading.request, self._states, rank.states
        )
        is_idle = rest.is_nothing and not len(states())
        releases = metadata.releases
        lifetime = self.lifetime_of(number, rank.agent, rest.taken, releases, is_idle=is_idle)

        def read(wanted: Wanted) -> OwnRead:
            times = reading.peer.times
            own = self._reads.read(
                nixl, ends, notification, wanted, reading.request, lifetime, times
            )
            counts = own.telemetry()
            reading.fate = reading.fate or own.fate
            if counts is not None:  # what it will count in: nothing has been so far
                counts.way = (self.pooled if wanted.staged else Way.DIRECT).value
            return own

        whole = self._whole_cross_layer_blocks(metadata, shares, reading.request)
        if whole is not None:  # stale tokens behind the last one come along, as in stock's blocks
            return read(Wanted((Plan(*whole),)))
        tails = None
        if reading.tails_left:  # once a request, and not before its blocks were checked
            tails = partial(self._tails, reading.request)
            reading.tails_left = False
        split = self.ways.split(shares, reading.peer.times, metadata.engine_id)
        pairs = (
            (share.segments, [copy for overlap in share.overlaps for copy in overlap.copies])
            for share in split.direct
        )
        direct = chain(plan_parts(pairs), (states(),))
        idle_until = reading.fate if is_idle else None
        return read(Wanted(direct, split.staged, split.staged_bytes, tails, idle_until))

    def prepare_like(
        self, nixl: Any, agent: str, lifetime: Lifetime, handle: Any, notification: bytes
    ) -> OwnRead:
        """A transfer of the release's, of a peer like us.

        Args:
            agent: the peer's rank.
            handle: prepared without a notification where there are checks: the peer is told once
                they have their answers.
        """
        return CheckedTransfer(nixl, handle, agent, lifetime, notification)

    def lifetime_of(
        self,
        number: int,
        agent: str,
        taken: frozenset[HeadName] | None = None,
        releases: Sequence[str] = (),
        *,
        is_idle: bool = False,
    ) -> Lifetime:
        """Of what is read of a rank: what checks it, and the lease of its blocks.

        What a read finds of the blocks stands in the metrics, and fails as a check's.

        Args:
            taken: heads that come from other ranks; None where the release reads.
            releases: that the peer may be of; none where it is this worker's.
            is_idle: whether nothing is read of it.

        Raises:
            ReadRefused: P's answer is of an engine with fewer ranks.
        """
        context = self.context
        if context is None:
            return Lifetime()
        lease, mask = self._lease(context, agent, releases), self.masks.get(agent)
        is_paced = self.thread is not None and taken is not None
        rank = RankRead(number, agent, mask, lease, is_paced, taken, is_idle)
        checks = context.checks_of(rank)  # P's answer may be of an engine with fewer ranks
        if is_idle:
            return Lifetime()
        fail = partial(self.failed_checks.append, context.request_id)
        lifetime = Lifetime(lease, context.request_id, checks, fail_check=fail)
        self.book.watch(context.request_id, lifetime)
        return lifetime

    def _lease(self, context: RequestContext, agent: str, releases: Sequence[str]) -> Lease:
        if context.expires is not None:
            return Lease(context.expires)
        leases = self.leases.at(releases)
        return leases.lease(agent, context.arrived, is_read_back=context.is_read_back)

    def holding_all(self, numbers: Sequence[int]) -> list[int]:
        """Those of the ranks that it takes to read every head that any of them holds.

        Raises:
            UnexpectedRead: nothing is being read.
        """
        ranks = self._being_read().peer.ranks
        held: frozenset[HeadName] = frozenset()
        found = []
        for number in numbers:
            heads = ranks[number].heads
            if not heads <= held:
                found.append(number)
            held |= heads
        return found

    def agent(self, number: int) -> str:
        """NIXL's name of a rank of the peer that is being read.

        Raises:
            UnexpectedRead: nothing is being read.
        """
        return self._being_read().peer.ranks[number].agent

    def _being_read(self) -> Reading:
        if self.context is None or self.context.reading is None:
            raise UnexpectedRead("a transfer was prepared outside a request")
        return self.context.reading

    @property
    def request_being_read(self) -> ReadRequest:
        """What is being read.

        Raises:
            UnexpectedRead: nothing is.
        """
        return self._being_read().request

    def _has_our_blocks(self, metadata: AgentMetadata) -> bool:
        ours = self._cross_layer
        return (
            ours is not None
            and metadata.form == ours.form
            and metadata.block_bytes[0] == ours.pool.block_bytes
            and metadata.tp_size == self.ours.tp_size
        )

    def _whole_cross_layer_blocks(
        self, metadata: AgentMetadata, shares: Sequence[Share], request: ReadRequest
    ) -> tuple[Int64Array, Int64Array, Int64Array] | None:
        """(remote address, local address, bytes) of blocks that are read as they are."""
        ours = self._cross_layer
        if ours is None or not self._has_our_blocks(metadata):
            return None
        if self.mode == "staged":
            return None
        # A block is one group's: it holds that group's layers, whichever it is.
        full = [share for share in shares if len(share.segments)]
        pairs = [pair_whole_blocks(share.segments) for share in full]
        whole = [pair for pair in pairs if pair is not None]
        ends = [ours.end_of(overlap.layer for overlap in share.overlaps) for share in full]
        parts = self.ours.kernel_blocks_per_block
        for _, remote_block, local_block in state_pairs(self.groups, metadata, request):
            if remote_block >= metadata.blocks // parts:
                raise ReadRefused(
                    f"the request names block {remote_block} of engine {metadata.engine_id}, "
                    f"which has {metadata.blocks // parts}",
                    AS_ANSWERED,
                )
            whole.append(
                (kernel_blocks([remote_block], parts), kernel_blocks([local_block], parts))
            )
            pairs.append(whole[-1])
            ends.append(ours.pool.block_bytes)
        if not whole or len(whole) < len(pairs):
            return None
        remote, local = (np.concatenate(blocks) for blocks in zip(*whole, strict=True))
        return (
            metadata.addresses[0] + remote * metadata.stride_bytes[0],
            ours.pool.address + local * ours.pool.block_bytes,
            np.repeat(np.array(ends, dtype=np.int64), [pair[0].size for pair in whole]),
        )

    def _tails(self, request: ReadRequest) -> Iterator[tuple[list[Plane], Segments]]:
        """What no transfer covers in a request's last blocks."""
        for layers, tail in tails_of(self.ours, self.groups, request):
            planes = (plane for name in layers for plane in self._layers[name].planes)
            yield [plane for plane in planes if not plane.is_whole], tail
