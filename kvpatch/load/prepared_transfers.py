"""What becomes of the transfers that the release prepares while it reads one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpatch.checks.digests.digest_checks import LoadDigest
from kvpatch.checks.holds.hold import Hold
from kvpatch.core.errors import KvpatchError
from kvpatch.load.read_request import ReadRequest
from kvpatch.peer.remote_ranks import Peer, RemoteRank
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
        """The ranks before one of which a read is prepared now."""
        if rank in self.ranks:  # once more, for memory of another kind
            return self.ranks[: self.ranks.index(rank)]
        before, self.ranks = self.ranks, (*self.ranks, rank)
        return before


@dataclass
class RequestContext:
    """One request, from when the release begins to prepare its transfers to when it has.

    Attributes:
        check: of the blocks to fill, ours or the release's; called until it has nothing to say.
        refusal: is raised in place of preparing a transfer. From 0.11.1 on the release fails one
            request there; an error anywhere before that would end the engine.
        reading: what ours are planned from, in place of the release's; None where its stand.
        hold: of P's on the blocks that are read; None where P says nothing of it.
        arrived: when D was given the request, as ``time.monotonic`` counts; None if unknown.
        is_read_back: whether a P reads an earlier turn back from a D.
        expires: when the peer has said that its blocks do; None where it does not.
        is_refused: whether that was booked.
        digest: what the load is checked by; None where digests are off.
    """

    request_id: str
    engine_id: str
    check: Callable[[], None] | None = None
    refusal: KvpatchError | None = None
    reading: Reading | None = None
    hold: Hold | None = None
    arrived: float | None = None
    is_read_back: bool = False
    expires: float | None = None
    is_refused: bool = False
    digest: LoadDigest | None = None

    def check_blocks(self) -> None:
        """Calls the check.

        There, and not before, the release makes a failed load of what it raises.
        """
        if self.check is not None:
            self.check()
            self.check = None
