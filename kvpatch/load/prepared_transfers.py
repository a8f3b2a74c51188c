"""What becomes of the transfers that the release prepares while it reads one request.

Patches hand in what makes the checks of a load, so that what is off is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvpatch.core.errors import KvpatchError
    from kvpatch.geometry.plane import HeadName
    from kvpatch.load.read_request import ReadRequest
    from kvpatch.peer.remote_ranks import Peer, RemoteRank
    from kvpatch.transfer.lifetime import Check, Lease
    from kvpatch.transfer.own_read import Fate


@dataclass
class Reading:
    """A request that we read.

    Attributes:
        tails_left: whether no read was told yet to zero what is behind its last token.
        ranks: of the peer, of which reads have been prepared.
        fate: of the first of these.
    """

    peer: Peer
    request: ReadRequest
    tails_left: bool = True
    ranks: tuple[RemoteRank, ...] = ()
    fate: Fate | None = None

    def taken_before(self, rank: RemoteRank) -> tuple[RemoteRank, ...]:
        """Returns the ranks before one of which a read is prepared now."""
        if rank in self.ranks:  # once more, for memory of another kind
            return self.ranks[: self.ranks.index(rank)]
        before, self.ranks = self.ranks, (*self.ranks, rank)
        return before


class RankRead(NamedTuple):
    """A read of one rank of a peer, before it is made.

    Attributes:
        number: of the rank.
        agent: NIXL's name of it.
        mask: hides its addresses in P's answers; None where it is not known.
        lease: of its blocks.
        is_paced: whether a thread drives the read, and not the next step alone.
        taken: heads that come from other ranks, and are not compared with what this one has;
            None where the release reads, which may fill some from several.
        is_idle: whether nothing is read, so that nobody minds what the rank holds.
    """

    number: int
    agent: str
    mask: int | None
    lease: Lease
    is_paced: bool
    taken: frozenset[HeadName] | None = None
    is_idle: bool = False


#: Of a read and the checks that were made for it before, makes one more, or None.
MakeCheck = Callable[[RankRead, "tuple[Check, ...]"], "Check | None"]


@dataclass
class RequestContext:
    """One request, from when the release begins to prepare its transfers to when it has.

    Attributes:
        check: of the blocks to fill, ours or the release's; called until it has nothing to say.
        refusal: is raised in place of preparing a transfer. From 0.11.1 on the release fails one
            request there; an error anywhere before that would end the engine.
        reading: what ours are planned from, in place of the release's; None where its stand.
        arrived: when D was given the request, as ``time.monotonic`` counts; None if unknown.
        is_read_back: whether a P reads an earlier turn back from a D.
        expires: when the peer has said that its blocks do; None where it does not.
        is_refused: whether that was booked.
        is_as_read: whether what is read stays as it is placed.
        checks: make the checks of each of its reads, in the order in which the read asks them.
        when_prepared: called once all reads have been prepared; with False if nothing is read.
    """

    request_id: str
    engine_id: str
    check: Callable[[], None] | None = None
    refusal: KvpatchError | None = None
    reading: Reading | None = None
    arrived: float | None = None
    is_read_back: bool = False
    expires: float | None = None
    is_refused: bool = False
    is_as_read: bool = True
    checks: list[MakeCheck] = field(default_factory=list)
    when_prepared: list[Callable[[bool], None]] = field(default_factory=list)

    def check_blocks(self) -> None:
        """Calls the check, here where the release makes a failed load of what it raises."""
        if self.check is not None:
            self.check()
            self.check = None

    def checks_of(self, rank: RankRead) -> tuple[Check, ...]:
        """Returns the checks of a read, in the order in which it asks them."""
        found: tuple[Check, ...] = ()
        for make in self.checks:
            check = make(rank, found)
            found += () if check is None else (check,)
        return found


#: Adds to a load's context what makes the checks of its reads.
CheckLoad = Callable[[RequestContext, "ReadRequest"], None]


class CheckMakers(dict[str, Callable[[Any, Any, Any], CheckLoad]]):
    """One worker's, by patch; called with its ``ReleaseWorker``, inspected caches and reader."""
