"""The reads of one worker from peers of another geometry, made when the first shakes hands.

The release goes on doing what it does for a peer like us: handshakes, books,
notifications, completion, failures. Only the transfer that it prepares is
another one, planned between the two geometries: the call that prepares it,
``make_prepped_xfer``, is the same in every release from 0.10.0 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import numpy as np

from kvpatch.core import settings
from kvpatch.core.errors import AS_ANSWERED, PeerRefused, ReadRefused
from kvpatch.geometry.cross_layer_blocks import pair_whole_blocks
from kvpatch.geometry.direct_plan import Plan, plan_parts
from kvpatch.geometry.plane import HeadName, Plane
from kvpatch.geometry.segments import Int64Array, Segments, kernel_blocks
from kvpatch.geometry.staged_plan import Share, plan_chunks
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.load.chosen_ways import ChosenWays, Progress
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.reader import Reader, ReadsOfOthers
from kvpatch.load.token_pairing import shares_of, state_pairs, states_plan, tails_of
from kvpatch.observe.catalogue import Way
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import peer_memory
from kvpatch.peer.remote_ranks import Peer, RemoteRank
from kvpatch.transfer.agent_gate import AgentGate, EngineAgent, ProgressAgent
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.lifetime import Lifetime
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.own_read import Fate, OwnRead
from kvpatch.transfer.plane_bytes import Tails
from kvpatch.transfer.progress_thread import BackgroundRead, ProgressThread, can_read_beside
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.worker.registered_caches import DeviceCaches
from kvpatch.worker.state import worker_state

if TYPE_CHECKING:
    import torch


class Wanted(NamedTuple):
    """The parts of a read from one rank.

    Attributes:
        direct: runs that go straight to their place; planned once the read has begun.
        staged: shares that go through the staging pool.
        tails: returns the blocks' ends to zero, once the read has begun; None where there are none.
        idle_until: the fate of a read from other ranks, where those hold all that this rank has.
            This rank gets only a notification, once that read is over.
    """

    direct: Iterable[Plan]
    staged: Sequence[Share] = ()
    tails: Callable[[], Tails] | None = None
    idle_until: Fate | None = None


class HeterogeneousReads:
    """The maker of one worker's reads from peers of another geometry.

    Args:
        reader: the worker's reader.
        pool: the pool that staged reads land in.
        progress: moves reads on between the engine's steps; None for the steps alone.
        pooled: the name in the metrics of reads through the pool.
    """

    def __init__(
        self,
        reader: Reader,
        pool: StagingPool,
        progress: Progress | None = None,
        pooled: Way = Way.STAGED,
    ) -> None:
        self._reader = reader
        self._ours, self._groups = reader.ours, reader.groups
        self.pool = pool
        self._pooled = pooled
        destination = reader.destination
        self._cross_layer = destination.cross_layer
        self._states = destination.states
        caches = destination.caches
        if caches is None:  # states move whole, and in releases <= 0.26 are lists of tensors
            caches = Caches({name: destination.tensors[name] for name in reader.layers})
        if progress is not None and isinstance(caches, Caches):
            caches.thread = progress.thread.copying
        self._caches, self._progress = caches, progress
        self._ways = ChosenWays(reader.mode, pool, caches.device)

    @property
    def thread(self) -> ProgressThread | None:
        """Returns the progress thread; None where reads go on in the engine's steps alone."""
        return None if self._progress is None else self._progress.thread

    def admit(self, rank: RemoteRank) -> None:
        """Books a rank that the release has admitted; another number of ranks begins anew."""
        metadata, peers = rank.metadata, self._reader.peers
        peer = peers.get(metadata.engine_id)
        if peer is None or any(
            known.metadata.tp_size != metadata.tp_size for known in peer.ranks.values()
        ):
            peer = peers[metadata.engine_id] = Peer()
        peer.add(rank, self._reader.planes)

    def prepare(self, nixl: Any, number: int, notification: bytes) -> OwnRead:
        """Returns the transfer that replaces the release's own, of one rank of the peer."""
        reader, reading = self._reader, self._reader.being_read()
        if reading.peer.missing is not None:
            raise PeerRefused(
                f"no rank of engine {reader.is_reading()} that we read from holds "
                f"{reading.peer.missing}",
                "use one model, one --tensor-parallel-size and one --pipeline-parallel-size on "
                "both sides",
            )
        rank = reading.peer.ranks[number]
        metadata = rank.metadata
        rest = rank.behind(reading.taken_before(rank), reader.planes)
        shares = shares_of(
            self._ours, self._groups, metadata, rest.overlaps, reading.request, rank.block_tokens
        )
        ends = Ends(
            self._ours.memory, peer_memory(self._ours, metadata), rank.agent, metadata.engine_id
        )
        states = partial(
            states_plan, self._groups, metadata, reading.request, self._states, rank.states
        )
        is_idle = rest.is_nothing and not len(states())
        releases = metadata.releases
        lifetime = reader.lifetime_of(number, rank.agent, rest.taken, releases, is_idle=is_idle)

        read = partial(self._read, nixl, ends, notification, lifetime)
        whole = self._whole_cross_layer_blocks(metadata, shares, reading.request)
        if whole is not None:  # stale tokens behind the last one come along, as in stock's blocks
            return read(Wanted((Plan(*whole),)))
        tails = None
        if reading.tails_left:  # once a request, and not before its blocks were checked
            tails = partial(self._tails, reading.request)
            reading.tails_left = False
        to_place, to_pool = self._ways.split(shares, metadata.engine_id)
        pairs = (
            (share.segments, [copy for overlap in share.overlaps for copy in overlap.copies])
            for share in to_place
        )
        direct = chain(plan_parts(pairs), (states(),))
        idle_until = reading.fate if is_idle else None
        return read(Wanted(direct, to_pool, tails, idle_until))

    def _read(
        self, nixl: Any, ends: Ends, notification: bytes, lifetime: Lifetime, wanted: Wanted
    ) -> OwnRead:
        """Makes a read that is not started, of which the peer is notified after the last byte."""
        reading, progress = self._reader.being_read(), self._progress
        chunks = plan_chunks(wanted.staged, self.pool.chunk_bytes)
        read = StagedRead(
            nixl if progress is None else progress.agent,
            self.pool,
            self._caches,
            ends,
            notification,
            wanted.direct,
            chunks,
        )
        read.lifetime = lifetime
        read.tails, read.idle_until = wanted.tails, wanted.idle_until
        own = read if progress is None else BackgroundRead(read, progress.thread)
        own.owner = reading.request
        reading.fate = reading.fate or own.fate
        counts = own.telemetry()
        if counts is not None:  # what it will count in: nothing has been so far
            counts.way = (self._pooled if wanted.staged else Way.DIRECT).value
        return own

    def holding_all(self, numbers: Sequence[int]) -> list[int]:
        """Returns those ranks that it takes to read every head that any of them holds."""
        ranks = self._reader.being_read().peer.ranks
        held: frozenset[HeadName] = frozenset()
        found = []
        for number in numbers:
            heads = ranks[number].heads
            if not heads <= held:
                found.append(number)
            held |= heads
        return found

    def agent(self, number: int) -> str:
        """Returns NIXL's name of a rank of the peer that is being read."""
        return self._reader.being_read().peer.ranks[number].agent

    def _has_our_blocks(self, metadata: AgentMetadata) -> bool:
        ours = self._cross_layer
        return (
            ours is not None
            and metadata.form == ours.form
            and metadata.block_bytes[0] == ours.pool.block_bytes
            and metadata.tp_size == self._ours.tp_size
        )

    def _whole_cross_layer_blocks(
        self, metadata: AgentMetadata, shares: Sequence[Share], request: ReadRequest
    ) -> tuple[Int64Array, Int64Array, Int64Array] | None:
        """Returns addresses there and here, and bytes, of blocks that are read as they are."""
        ours = self._cross_layer
        if ours is None or not self._has_our_blocks(metadata):
            return None
        if self._reader.mode == "staged":
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


def reads_of(worker: Any, reader: Reader) -> ReadsOfOthers:
    """Returns what reads from a worker's heterogeneous peers, made for the first of them.

    From then on another thread than the engine's may use the worker's NIXL agent. vLLM shakes hands
    with one peer at a time, so that no other handshake is in the agent now; and no read is made
    before this handshake is over, so that the engine's next step meets the gate.
    """
    if reader.heterogeneous is None:
        reader.heterogeneous = _made(worker, reader)
    return reader.heterogeneous


def _made(worker: Any, reader: Reader) -> HeterogeneousReads:
    behind, destination = worker_state(worker).held(DeviceCaches), reader.destination
    copied_to = None if behind is None else behind.device
    placed_on = destination.device if copied_to is None else copied_to
    shared = worker.nixl_wrapper.__wrapped__
    agent, gate = shared.__wrapped__, AgentGate()
    if isinstance(agent, EngineAgent):  # of an earlier registration
        agent, gate = agent.__wrapped__, agent.gate
    has_thread = settings.progress() == "auto" and can_read_beside(placed_on, destination.caches)
    nixl = ProgressAgent(agent, gate) if has_thread else agent
    pool = staging_pool(nixl, reader.ours.memory, destination.device, copied_to=copied_to)
    progress = Progress(ProgressThread(pool, placed_on, gate), nixl) if has_thread else None
    made = HeterogeneousReads(
        reader, pool, progress, Way.STAGED if behind is None else Way.HOST_BUFFER
    )
    if progress is not None:
        finalize(worker.nixl_wrapper, progress.thread.stop)
        shared.__wrapped__ = EngineAgent(agent, gate)
    return made


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
        place = (buffer.data_ptr(), size_bytes, memory.device_id, "")
        nixl.register_memory(nixl.get_reg_descs([place], memory.kind))
        return buffer

    on_device = device.type != "cpu" or (copied_to is not None and copied_to.type != "cpu")
    return StagingPool(settings.staging_bytes(), make, on_device)
