"""What one worker knows of its reads, whoever makes them, and the checks of those of vLLM's own.

vLLM reads from peers like this engine itself. What reads from all others is made when the first of
them shakes hands (``heterogeneous_reads``), and not imported before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvpatch.core.errors import KvpatchError, UnexpectedRead, UnlikePrompts, UnpairableBlocks
from kvpatch.core.recent_engines import RecentEngines
from kvpatch.load.prepared_transfers import CheckLoad, RankRead, Reading, RequestContext
from kvpatch.observe.book import Book
from kvpatch.transfer.lifetime import Lease, Leases, Lifetime

if TYPE_CHECKING:
    import torch

    from kvpatch.geometry.plane_heads import HeadName
    from kvpatch.peer.cross_layer_blocks import RegisteredCrossLayerBlocks
    from kvpatch.peer.remote_ranks import Peer, RemoteRank
    from kvpatch.transfer.caches import Caches
    from kvpatch.transfer.own_read import OwnRead
    from kvpatch.transfer.progress_thread import ProgressThread
    from kvpatch.transfer.staging_pool import StagingPool
    from kvpatch.transfer.storageless import StoragelessCaches
    from kvpatch.worker.kv_cache_groups import Group
    from kvpatch.worker.local_geometry import LocalGeometry
    from kvpatch.worker.recurrent_state import StatePages
    from kvpatch.worker.registered_caches import LayerCache

#: Failed checks that nobody has taken; where nobody does the oldest go.
_MOST_FAILED = 65536


@dataclass(frozen=True)
class Destination:
    """What reads fill.

    Attributes:
        tensors: where they are placed.
        device: of what is registered with NIXL, the staging pool too.
        layers: of `tensors`, where the release was shown others: a host buffer of the same
            layout and other blocks, or what stands for cross-layer blocks; None where it was
            `tensors`.
        cross_layer: what is registered, where blocks are cross-layer blocks.
        caches: what places reads where `tensors` only stand for those of the device.
        states: the pages of layers with recurrent state, where they really lie.
    """

    tensors: Mapping[str, torch.Tensor]
    device: torch.device
    layers: Mapping[str, LayerCache] | None = None
    cross_layer: RegisteredCrossLayerBlocks | None = None
    caches: Caches | StoragelessCaches | None = None
    states: Mapping[str, StatePages] = field(default_factory=dict)


def _as_it_is(_: str, message: bytes) -> bytes | None:
    return message


class ReadsOfOthers(Protocol):
    """What reads from peers of another geometry (``heterogeneous_reads``).

    Attributes:
        pool: where staged reads land.
    """

    pool: StagingPool

    @property
    def thread(self) -> ProgressThread | None:
        """What reads go on in between the engine's steps; None for the steps alone."""

    def prepare(self, nixl: Any, number: int, notification: bytes) -> OwnRead:
        """Returns the transfer that replaces vLLM's own, of one rank of the peer."""

    def holding_all(self, numbers: Sequence[int]) -> list[int]:
        """Returns those ranks that it takes to read every head that any of them holds."""

    def admit(self, rank: RemoteRank) -> None:
        """Books a rank that vLLM has admitted."""

    def agent(self, number: int) -> str:
        """Returns NIXL's name of a rank of the peer that is being read."""


class Reader:
    """One worker's.

    Args:
        destination: what reads fill.
        mode: ``auto``, ``direct`` or ``staged``, for heterogeneous reads.

    Attributes:
        peers: those of another geometry, by engine id.
        heterogeneous: what reads from these; None before the first of them shakes hands.
        context: the request that vLLM prepares transfers for; None outside one.
        leases: how long peers keep what is to be read.
        to_engine: (engine id, message) -> the message in that engine's words, None for none.
        to_agent: (NIXL's name of a rank, message) -> the same.
        understood: notifications by sender -> those that the release can take.
        masks: by NIXL's name of a rank, what hides its addresses in P's answers.
        check_makers: give each load what makes the checks of its reads.
        book: of its worker.
        failed_checks: names of requests whose loads a check has failed, on whatever thread.
    """

    def __init__(
        self, ours: LocalGeometry, groups: tuple[Group, ...], destination: Destination, mode: str
    ) -> None:
        self.ours = ours
        self.groups = groups
        self.destination = destination
        self.mode = mode
        self.peers: dict[str, Peer] = {}
        self._unbooked: frozenset[str] = frozenset()
        self.heterogeneous: ReadsOfOthers | None = None
        self.layers = ours.layers if destination.layers is None else destination.layers
        self.planes = [plane for layer in self.layers.values() for plane in layer.planes]
        self.context: RequestContext | None = None
        self.leases = Leases()
        self.to_engine: Callable[[str, bytes], bytes | None] = _as_it_is
        self.to_agent: Callable[[str, bytes], bytes | None] = _as_it_is
        self.understood: Callable[[Any], Any] = dict
        self.masks: RecentEngines[int] = RecentEngines()
        self.check_makers: tuple[CheckLoad, ...] = ()
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

    def admit_like(self, engine_id: str) -> None:
        """Books a rank of a peer like us, which the release reads."""
        self.peers.pop(engine_id, None)

    @property
    def thread(self) -> ProgressThread | None:
        """The thread of heterogeneous reads; None in steps alone, and before the first peer."""
        return None if self.heterogeneous is None else self.heterogeneous.thread

    @property
    def has_state(self) -> bool:
        """Whether some of our layers have recurrent state."""
        return bool(self.destination.states)

    @property
    def is_for_all(self) -> bool:
        """Whether peers like us are read by us too: the release does not know our tensors."""
        return self.layers is not self.ours.layers

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

    def being_read(self) -> Reading:
        """Returns what is being read from a peer of another geometry.

        Raises:
            UnexpectedRead: nothing is.
        """
        if self.context is None or self.context.reading is None:
            raise UnexpectedRead("a transfer was prepared outside a request")
        return self.context.reading
