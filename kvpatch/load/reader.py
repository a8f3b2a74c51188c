"""The state of one worker's loads, and of the reads that kvpatch makes for them.

vLLM reads from peers like this engine itself. What reads from all others is made when the first of
them shakes hands (``heterogeneous_reads``), and not imported before. Patches hand in what makes the
checks of a load, so that what is off is not imported either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from kvpatch.core.errors import AnswerGone, KvpatchError, UnlikePrompts, UnpairableBlocks
from kvpatch.core.recent_engines import RecentRanks
from kvpatch.observe.book import Book
from kvpatch.transfer.lease import Lease, Leases, Lifetime

if TYPE_CHECKING:
    import torch

    from kvpatch.geometry.plane import HeadName
    from kvpatch.load.read_request import ReadRequest
    from kvpatch.peer.cross_layer_blocks import RegisteredCrossLayerBlocks
    from kvpatch.peer.remote_ranks import Peer, RemoteRank
    from kvpatch.transfer.caches import Caches
    from kvpatch.transfer.lease import Check
    from kvpatch.transfer.own_read import Fate
    from kvpatch.transfer.progress_thread import ProgressThread
    from kvpatch.transfer.storageless import StoragelessCaches
    from kvpatch.worker.kv_cache_groups import Group
    from kvpatch.worker.local_geometry import LocalGeometry
    from kvpatch.worker.recurrent_state import StatePages
    from kvpatch.worker.registered_caches import LayerCache


#: Makes a check of a read, which has those that were made before it, or None.
MakeCheck = Callable[[Lifetime], "Check | None"]


@dataclass
class RequestContext:
    """The state of one request while the release prepares its transfers.

    Attributes:
        request: what the scheduler knew of the load; None where kvpatch is not on there.
        peer: the peer of another geometry that kvpatch reads from; None where the release reads.
        refusal: is raised in place of preparing a transfer. From 0.11.1 on the release fails one
            request there; an error anywhere before that would end the engine.
        expires: when the peer has said that its blocks do; None where it does not.
        is_refused: whether a refusal was booked.
        is_of_smaller: whether the release reads P's smaller blocks, and is refused this load.
        is_as_read: whether what is read stays as it is placed.
        checks: make the checks of each of its reads, in the order in which the read asks them.
        tails_left: whether no read was told yet to zero what is behind its last token.
        ranks: of the peer, of which reads have been prepared.
        fate: of the first of these.
    """

    request_id: str
    engine_id: str
    request: ReadRequest | None = None
    peer: Peer | None = None
    refusal: KvpatchError | None = None
    expires: float | None = None
    is_refused: bool = False
    is_of_smaller: bool = False
    is_as_read: bool = True
    checks: list[MakeCheck] = field(default_factory=list)
    tails_left: bool = True
    ranks: tuple[RemoteRank, ...] = ()
    fate: Fate | None = None

    def taken_before(self, rank: RemoteRank) -> tuple[RemoteRank, ...]:
        """Returns the ranks before one of which a read is prepared now."""
        if rank in self.ranks:  # once more, for memory of another kind
            return self.ranks[: self.ranks.index(rank)]
        before, self.ranks = self.ranks, (*self.ranks, rank)
        return before


#: Adds to a load's context what makes the checks of its reads.
CheckLoad = Callable[[RequestContext, "ReadRequest"], None]


class CheckMakers(dict[str, Callable[[Any, Any], CheckLoad]]):
    """The makers of one worker's checks, by patch.

    Each takes the ``ReleaseWorker`` and the :class:`Reader`; None where there is none.
    """


#: Failed checks that nobody has taken; where nobody does the oldest go.
_MOST_FAILED = 65536


@dataclass(eq=False, repr=False)
class Loads:
    """The state of one worker's loads and of their checks, whatever its cache is and who reads.

    Attributes:
        find_leases: returns how long peers keep the blocks that are to be read.
        understood: notifications by sender -> those that the release can take.
        context: the request that vLLM prepares transfers for; None outside one.
        masks: by NIXL's name of a rank, the mask of its addresses in P's answers.
        check_makers: give each load the makers of its reads' checks.
        failed_checks: names of requests whose loads a check has failed, on any thread.
    """

    find_leases: Callable[[], Leases]
    understood: Callable[[Any], Any]
    book: Book
    context: RequestContext | None = None
    masks: RecentRanks[int] = field(default_factory=RecentRanks)
    check_makers: tuple[CheckLoad, ...] = ()
    failed_checks: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_FAILED))

    @cached_property
    def leases(self) -> Leases:
        return self.find_leases()

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Counts refusals while inside; those of a request that reads from many ranks once."""
        try:
            yield
        except KvpatchError as error:
            context = self.context
            if context is None or not context.is_refused:
                self.book.refuse(error)
            if context is not None:
                context.is_refused = True
                if isinstance(error, UnlikePrompts | UnpairableBlocks | AnswerGone):
                    self.failed_checks.append(context.request_id)
            raise

    def lifetime_of(
        self,
        number: int,
        agent: str,
        taken: frozenset[HeadName] | None = None,
        releases: Sequence[str] = (),
        *,
        is_paced: bool = False,
        is_idle: bool = False,
    ) -> Lifetime:
        """Returns what checks a read of a rank, and the lease of its blocks.

        What the read finds of the blocks stands in the metrics, and fails as a check's.

        Args:
            taken, is_paced, is_idle: as of a :class:`Lifetime`.
            releases: that the peer may be of; none where it is this worker's.
        """
        context = self.context
        if context is None:
            return Lifetime()
        found = Lifetime(
            self._lease(context, agent, releases),
            context.request_id,
            agent,
            number,
            self.masks.used(agent),
            fail_check=partial(self.failed_checks.append, context.request_id),
            is_paced=is_paced,
            taken=taken,
            is_idle=is_idle,
        )
        for make in context.checks:  # P's answer may be of an engine with fewer ranks
            check = make(found)
            found.checks += () if check is None else (check,)
        if is_idle:
            return Lifetime()
        self.book.watch(context.request_id, found)
        return found

    def _lease(self, context: RequestContext, agent: str, releases: Sequence[str]) -> Lease:
        if self.leases == Leases():  # none are looked at
            return Lease()
        if context.expires is not None:
            return Lease(context.expires)
        request, leases = context.request, self.leases.at(releases)
        if request is None:
            return Lease()
        return leases.lease(agent, request.arrived, is_read_back=request.is_read_back)


@dataclass(eq=False, repr=False)
class Reader:
    """The geometry of one worker's cache, and the peers that kvpatch reads into it from.

    A worker has one where its cache can be read into.

    Attributes:
        tensors: that reads fill.
        layers: of these; `ours` has others where the release was shown other tensors: a host buffer
            of the same layout and other blocks, or stand-ins for cross-layer blocks.
        device: of what is registered with NIXL, and of the staging pool.
        states: the pages of layers with recurrent state, where they really lie.
        mode: ``auto``, ``direct`` or ``staged``, for heterogeneous reads.
        cross_layer: what is registered, where blocks are cross-layer blocks.
        caches: places the bytes where `tensors` only stand for those of the device.
        peers: peers of another geometry, by engine id.
        heterogeneous: the ``HeterogeneousReads`` of these; None before the first shakes hands.
    """

    ours: LocalGeometry
    groups: tuple[Group, ...]
    tensors: Mapping[str, torch.Tensor]
    layers: Mapping[str, LayerCache]
    device: torch.device
    states: Mapping[str, StatePages]
    mode: str
    cross_layer: RegisteredCrossLayerBlocks | None = None
    caches: Caches | StoragelessCaches | None = None
    peers: dict[str, Peer] = field(default_factory=dict)
    heterogeneous: Any = None
    _unbooked: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.planes = [plane for layer in self.layers.values() for plane in layer.planes]

    def keep(self, booked: Collection[str]) -> None:
        """Forgets the engines that the release has let go of, or never took on.

        It books an engine when all ranks have shaken hands. So an engine is forgotten that is not
        booked at two handshakes of others.

        Args:
            booked: the engines that the release knows, and the one that hands are shaken with.
        """
        unbooked = frozenset(self.peers).difference(booked)
        for engine_id in unbooked & self._unbooked:
            self.peers.pop(engine_id, None)
        self._unbooked = unbooked

    @property
    def thread(self) -> ProgressThread | None:
        """The thread of heterogeneous reads; None in steps alone, and before the first peer."""
        found: ProgressThread | None = getattr(self.heterogeneous, "thread", None)
        return found

    @property
    def is_for_all(self) -> bool:
        """True if kvpatch must read identical peers too: vLLM was shown stand-in tensors."""
        return self.layers is not self.ours.layers
