"""The reads of one worker from peers of another geometry, made when the first shakes hands.

The release goes on doing what it does for a peer like us: handshakes, books,
notifications, completion, failures. Only the transfer that it prepares is
another one, planned between the two geometries: the call that prepares it,
``make_prepped_xfer``, is the same in every release from 0.10.0 on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from kvpatch.core import settings
from kvpatch.core.errors import AS_ANSWERED, PeerRefused, ReadRefused, UnexpectedRead
from kvpatch.geometry.cross_layer_blocks import pair_whole_blocks
from kvpatch.geometry.direct_plan import Plan, plan_parts
from kvpatch.geometry.overlap import DEVICE_MEMORY, HOST_MEMORY, Overlap, is_direct
from kvpatch.geometry.plane import HeadName, Memory, Plane
from kvpatch.geometry.segments import Int64Array, Segments, kernel_blocks
from kvpatch.geometry.staged_plan import Share, plan_chunks
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.reader import Loads, Reader, RequestContext
from kvpatch.load.token_pairing import shares_of, state_pairs, states_plan, tails_of
from kvpatch.observe.catalogue import Way
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import peer_memory
from kvpatch.peer.remote_ranks import Peer, RemoteRank
from kvpatch.transfer.agent_gate import AgentGate, EngineAgent, ProgressAgent
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.nixl import Ends, errors_of, tell_over
from kvpatch.transfer.own_read import JoinedRead, OwnRead
from kvpatch.transfer.progress_thread import BackgroundRead, ProgressThread, can_read_beside
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.worker.registered_caches import DeviceCaches
from kvpatch.worker.state import worker_state

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.unlike_engines")


class HeterogeneousReads:
    """The maker of one worker's reads from peers of another geometry, made for the first of them.

    From then on another thread than the engine's may use the worker's NIXL agent. vLLM shakes hands
    with one peer at a time, so that no other handshake is in the agent now; and no read is made
    before this handshake is over, so that the engine's next step meets the gate.

    Attributes:
        pool: the pool that staged reads land in.
        thread: moves reads on between the engine's steps; None for the steps alone.
    """

    def __init__(self, worker: Any, loads: Loads, reader: Reader) -> None:
        self._loads = loads
        #: Memory that NIXL did not let go of.
        self._still_registered: list[torch.Tensor] = []
        self._reader, self._ours, self._groups = reader, reader.ours, reader.groups
        behind = worker_state(worker).held(DeviceCaches)
        copied_to = None if behind is None else behind.device
        placed_on = reader.device if copied_to is None else copied_to
        #: The name in the metrics of reads through the pool.
        self._pooled = Way.STAGED if behind is None else Way.HOST_BUFFER
        shared = worker.nixl_wrapper.__wrapped__
        agent, gate = shared.__wrapped__, AgentGate()
        if isinstance(agent, EngineAgent):  # of an earlier registration
            agent, gate = agent.__wrapped__, agent.gate
        has_thread = settings.progress() == "auto" and can_read_beside(placed_on, reader.caches)
        self._nixl = ProgressAgent(agent, gate) if has_thread else shared
        memory = reader.ours.memory
        self.pool = staging_pool(self._nixl, memory, reader.device, copied_to=copied_to)
        self.thread = ProgressThread(self.pool, placed_on, gate) if has_thread else None
        caches = reader.caches
        if caches is None:  # states move whole, and in releases <= 0.26 are lists of tensors
            caches = Caches({name: reader.tensors[name] for name in reader.layers})
        self._caches = caches
        self._costs = HOST_MEMORY if caches.device.type == "cpu" else DEVICE_MEMORY
        if self.thread is not None:
            if isinstance(caches, Caches):
                caches.thread = self.thread.copying
            finalize(worker.nixl_wrapper, self.thread.stop)
            shared.__wrapped__ = EngineAgent(agent, gate)

    def rest(self, agent: Any) -> None:
        """Ends the thread until the next read, and gives back the pool where no read has any of it.

        Args:
            agent: as the engine's threads use it.
        """
        paused: AbstractContextManager[None] = nullcontext()
        if self.thread is not None:
            self.thread.rest()
            paused = self.thread.paused()
        with paused:
            buffer = self.pool.let_go()
        if buffer is not None:
            try:
                agent.deregister_memory(_registration(agent, self._ours.memory, buffer))
            except errors_of(agent):
                self._still_registered.append(buffer)
                _LOG.warning("the staging pool could not be taken back from NIXL", exc_info=True)

    def admit(self, rank: RemoteRank) -> None:
        """Books a rank that the release has admitted; another number of ranks begins anew."""
        metadata, peers = rank.metadata, self._reader.peers
        peer = peers.get(metadata.engine_id)
        if peer is None or any(
            known.metadata.tp_size != metadata.tp_size for known in peer.ranks.values()
        ):
            peer = peers[metadata.engine_id] = Peer()
        peer.add(rank, self._reader.planes)

    def prepare(
        self, agent: Any, context: RequestContext, ranks: Sequence[int], notification: bytes
    ) -> OwnRead:
        """Returns the transfer that replaces the release's own, from some ranks of the peer.

        Args:
            agent: takes our reads for NIXL's own transfers.
        """
        peer, request = context.peer, context.request
        if peer is None or request is None:
            raise UnexpectedRead("a transfer was prepared outside a request")
        if peer.missing is not None:
            raise PeerRefused(
                f"no rank of engine {context.engine_id} that we read from holds {peer.missing}",
                "use one model, one --tensor-parallel-size and one --pipeline-parallel-size on "
                "both sides",
            )
        read = partial(self._prepare, context, request, notification)
        if len(ranks) == 1:
            return read(peer.ranks[ranks[0]])
        held: frozenset[HeadName] = frozenset()
        needed, others = [], []
        for rank in (peer.ranks[number] for number in ranks):
            if rank.heads <= held:
                others.append(rank.agent)
            else:
                needed.append(rank)
                held |= rank.heads
        with ExitStack() as prepared:
            reads = []
            for rank in needed:
                reads.append(read(rank))
                prepared.callback(agent.release_xfer_handle, reads[-1])
            prepared.pop_all()
        joined = JoinedRead(
            agent, reads, lambda: tell_over(agent.__wrapped__, others, notification)
        )
        joined.owner = request
        return joined

    def _prepare(
        self, context: RequestContext, request: ReadRequest, notification: bytes, rank: RemoteRank
    ) -> OwnRead:
        """Makes a read of one rank, which is notified after the last byte; it is not started."""
        metadata, ours = rank.metadata, self._ours
        rest = rank.behind(context.taken_before(rank), self._reader.planes)
        shares = shares_of(ours, self._groups, metadata, rest.overlaps, request, rank.block_tokens)
        states = partial(
            states_plan, self._groups, metadata, request, self._reader.states, rank.states
        )
        is_idle = rest.is_nothing and not len(states())
        lifetime = self._loads.lifetime_of(
            *(metadata.tp_rank, rank.agent, rest.taken, metadata.releases),
            is_paced=self.thread is not None,
            is_idle=is_idle,
        )
        to_pool: Sequence[Share] = ()
        whole = self._whole_cross_layer_blocks(metadata, shares, request)
        if whole is not None:  # stale tokens behind the last one come along, as in stock's blocks
            direct = iter((Plan(*whole),))
        else:
            to_place, to_pool = self._ways(shares, metadata.engine_id)
            pairs = (
                (share.segments, [copy for overlap in share.overlaps for copy in overlap.copies])
                for share in to_place
            )
            direct = chain(plan_parts(pairs), (states(),))  # planned once the read has begun
        read = StagedRead(
            self._nixl,
            self.pool,
            self._caches,
            Ends(ours.memory, peer_memory(ours, metadata), rank.agent, metadata.engine_id),
            notification,
            direct,
            plan_chunks(to_pool, self.pool.chunk_bytes),
        )
        read.lifetime = lifetime
        if whole is None:
            if context.tails_left:  # once a request, and not before its blocks were checked
                read.tails = partial(self._tails, request)
                context.tails_left = False
            # Other ranks hold all that this one has: it is notified once their read is over.
            read.idle_until = context.fate if is_idle else None
        own = read if self.thread is None else BackgroundRead(read, self.thread)
        own.owner = request
        context.fate = context.fate or own.fate
        counts = own.telemetry()
        if counts is not None:  # what it will count in: nothing has been so far
            counts.way = (self._pooled if to_pool else Way.DIRECT).value
        return own

    def _ways(self, shares: Sequence[Share], engine_id: str) -> tuple[list[Share], list[Share]]:
        """Returns what goes straight to its place, and what goes through the pool."""
        direct: list[Share] = []
        staged: list[Share] = []
        for share in shares:
            if not len(share.segments):
                continue
            # Layers that are strided alike are judged once.
            known: dict[Any, bool] = {}
            for overlap in share.overlaps:
                if overlap.shape not in known:
                    known[overlap.shape] = self._is_direct(overlap, share)
            for kind, is_straight in ((direct, True), (staged, False)):
                chosen = tuple(one for one in share.overlaps if known[one.shape] is is_straight)
                if chosen:
                    kind.append(replace(share, overlaps=chosen))
        _LOG.debug(
            "%d regions of engine %s are read directly, %d staged",
            sum(len(share.overlaps) for share in direct),
            engine_id,
            sum(len(share.overlaps) for share in staged),
        )
        return direct, staged

    def _is_direct(self, overlap: Overlap, share: Share) -> bool:
        if self._reader.mode != "auto":
            return self._reader.mode == "direct"
        if overlap.staged_bytes > self.pool.size_bytes:
            return True
        return is_direct(overlap, share.segments, self._costs)

    def _whole_cross_layer_blocks(
        self, metadata: AgentMetadata, shares: Sequence[Share], request: ReadRequest
    ) -> tuple[Int64Array, Int64Array, Int64Array] | None:
        """Returns addresses there and here, and bytes, of blocks that are read as they are."""
        ours = self._reader.cross_layer
        if (
            ours is None
            or self._reader.mode == "staged"
            or metadata.form != ours.form
            or metadata.block_bytes[0] != ours.pool.block_bytes
            or metadata.tp_size != self._ours.tp_size
        ):
            return None
        # A block is one group's: it holds that group's layers, whichever it is.
        full = [share for share in shares if len(share.segments)]
        pairs = [pair_whole_blocks(share.segments) for share in full]
        whole = [pair for pair in pairs if pair is not None]
        ends = [ours.end_of(overlap.layer for overlap in share.overlaps) for share in full]
        parts = self._ours.kernel_blocks_per_block
        for _, remote_block, local_block in state_pairs(self._groups, metadata, request):
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
        """Yields what no transfer covers in a request's last blocks."""
        for layers, tail in tails_of(self._ours, self._groups, request):
            planes = (plane for name in layers for plane in self._reader.layers[name].planes)
            yield [plane for plane in planes if not plane.is_whole], tail


def _registration(nixl: Any, memory: Memory, buffer: torch.Tensor) -> Any:
    place = (buffer.data_ptr(), buffer.numel(), memory.device_id, "")
    return nixl.get_reg_descs([place], memory.kind)


def staging_pool(
    nixl: Any, memory: Memory, device: torch.device, *, copied_to: torch.device | None = None
) -> StagingPool:
    """Returns a pool that becomes memory, registered with NIXL, when the first read needs it.

    Args:
        copied_to: the cache's own device, where that copies from a pool in host memory.
    """

    def make(size_bytes: int) -> torch.Tensor:
        import torch

        pinned = (
            copied_to is not None and copied_to.type != "cpu" and torch.accelerator.is_available()
        )
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        if device.type != "cpu":
            # Whoever had this memory before may have work in the queue; NIXL waits for nobody.
            torch.get_device_module(device).synchronize(device)
        nixl.register_memory(_registration(nixl, memory, buffer))
        return buffer

    on_device = device.type != "cpu" or (copied_to is not None and copied_to.type != "cpu")
    return StagingPool(settings.staging_bytes(), make, on_device)
