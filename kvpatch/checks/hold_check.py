"""Asks P's table of holds whether the blocks of a request are still its own."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from kvpatch.checks.grants import Hold, read_hold
from kvpatch.checks.tables import (
    MOST_MISSED,
    PAUSE_SECONDS,
    WORD_BYTES,
    HoldTable,
    Patience,
    TableRead,
    is_still_to_come,
    may_be_table,
    word_address,
)
from kvpatch.core.errors import AnswerGone, PeerRefused, ReadRefused
from kvpatch.load.read_request import HOLD, ReadRequest
from kvpatch.load.reader import RequestContext
from kvpatch.observe.catalogue import CheckResult
from kvpatch.transfer.lease import Lifetime
from kvpatch.transfer.nixl import READ_ERRORS, errors_of

_LOG = logging.getLogger("kvpatch.staging")

#: A read of whose blocks nothing was heard for so long asks before it begins.
_ASK_AGAIN_SECONDS = 1.0
#: A peer whose word could not be read is asked again at every so many loads.
_ASK_ONCE_IN_LOADS = 64
#: Polls at a word that P has not written, or that does not come though P's lease is over.
_MOST_POLLS = 2000
#: The same at the word of an earlier turn: D writes it with the step behind its answer, however
#: long the one takes that is under way (asynchronous scheduling).
_MOST_POLLS_OF_TURN = 60_000
_MOST_PEERS = 4096


@dataclass(eq=False)
class HoldCheck(TableRead[HoldTable]):
    """The check that a peer's rank still holds the blocks that one read reads.

    Args:
        vouched: when the peer was last known to hold the blocks, as ``time.monotonic`` counts.
        ends: when the peer's lease is over for good, as ``time.monotonic`` counts.
        is_read_back: True if a P reads an earlier turn back from a D.
    """

    vouched: float
    ends: float = inf
    is_read_back: bool = False
    _asked: float | None = field(default=None, init=False)

    proves_hold = True

    def __post_init__(self) -> None:
        self._patience = self._new_patience()

    def _new_patience(self) -> Patience:
        return Patience(_MOST_POLLS_OF_TURN if self.is_read_back else _MOST_POLLS)

    @property
    def is_due(self) -> bool:
        """True if the blocks may be gone for long: nothing is read of them before it is known."""
        return self._asked is not None or time.monotonic() - self.vouched > _ASK_AGAIN_SECONDS

    def ask(self, nixl: Any, *, has_begun: bool) -> CheckResult | None:
        """Returns whether the peer holds the blocks; a word that cannot be read proves nothing."""
        try:
            is_held = self.answer(nixl)
        except (*READ_ERRORS, *errors_of(nixl)) as error:
            self._give_up(nixl, error, has_begun=has_begun)
            return CheckResult.UNPROVEN
        if is_held is False:
            _LOG.warning(
                "%s let go of a request's blocks before they had all been read: the load fails. "
                "Either its lease ran out: a longer kv_lease_duration there "
                "(VLLM_NIXL_ABORT_REQUEST_TIMEOUT <= 0.21) waits for slower readers; or another "
                "reader has read them before: an answer of P's is for one request; or it has "
                "started anew since it answered",
                self.agent,
            )
            return CheckResult.GONE
        return None if is_held is None else CheckResult.HELD

    def answer(self, nixl: Any) -> bool | None:
        """True if the peer held the blocks when this was first called; None until it is known.

        The call after an answer asks anew.

        Args:
            nixl: the agent, as the thread may use it that calls this.

        Raises:
            PeerRefused: the word cannot be read, or has not come by the end of the lease.
            Exception: NIXL's.
        """
        now, remote = time.monotonic(), word_address(self.remote_table, self.generation)
        raw = self._read(nixl, remote, WORD_BYTES)
        if raw is not None or self._handle is not None:
            self._asked = self._asked or now
        if self._asked is None:
            return None  # all places for words are taken
        if raw is None:  # for as long as a transfer of the release's would take
            if time.monotonic() > self.ends and self._patience.is_over():
                raise PeerRefused(
                    f"{self.agent} has not answered, and its lease is over",
                    "see whether P is alive and can be reached from here, and send the request "
                    "again",
                )
            return None
        self._leave()
        self._next, found = now + PAUSE_SECONDS, int.from_bytes(raw, "little")
        # P's workers write a word before they compute the request. One that does not come is that
        # of an engine that has started anew.
        if is_still_to_come(found, self.generation) and not self._patience.is_over():
            return None
        if found == self.generation:
            self.vouched = self._asked
        self.table.missed.pop((self.agent, self.remote_table), None)
        self._asked, self._next, self._patience = None, 0.0, self._new_patience()
        return found == self.generation

    def _give_up(self, nixl: Any, error: Exception, *, has_begun: bool) -> None:
        """Gives the word up; the load goes on as with a peer that gives none."""
        # Whether the data can be read is not known before it was.
        is_news = has_begun and self._miss()
        _LOG.log(
            logging.WARNING if is_news else logging.DEBUG,
            "loads from %s are not proven, as its word on them cannot be read: %s. The word comes "
            "from host memory to host memory: UCX_TLS has to name a transport for that",
            self.agent,
            error,
        )
        try:
            self.release(nixl)
        except errors_of(nixl):
            _LOG.debug("a read of a word could not be released", exc_info=True)

    def _miss(self) -> bool:
        """Books that the data could be read and the word could not; True if it is news."""
        peer, missed = (self.agent, self.remote_table), self.table.missed
        if len(missed) > _MOST_PEERS:  # what clients forge is told apart from what peers say
            missed.clear()
        missed[peer] += 1
        return missed[peer] == 1

    def release(self, nixl: Any) -> None:
        """Lets go of what is on its way; the next call asks anew.

        Raises:
            Exception: NIXL's, where it cannot be cancelled.
        """
        self._asked = None
        super().release(nixl)


def check_hold(table: HoldTable, context: RequestContext, request: ReadRequest) -> None:
    """Adds to a load's reads a check of P's word, where P states a hold."""
    stated = request.stated.get(HOLD)
    try:
        hold = None if stated is None else read_hold(stated)
    except ReadRefused as error:
        context.refusal = error
        return
    if hold is not None:
        context.checks.append(partial(_of_rank, table, hold, context, request))


def _of_rank(
    table: HoldTable,
    hold: Hold,
    context: RequestContext,
    request: ReadRequest,
    rank: Lifetime,
) -> HoldCheck | None:
    """Asks a rank of the peer for its word; None where it cannot be asked.

    Raises:
        AnswerGone: P's answer is of an engine with fewer ranks, or of an earlier start of it.
    """
    if rank.mask is None:
        return None
    if rank.number >= len(hold.tables):
        raise AnswerGone(
            f"request {context.request_id} is read from rank {rank.number} of engine "
            f"{context.engine_id}, and the answer of P that it carries is of an engine with "
            f"{len(hold.tables)} ranks",
            "pass on the answer of the engine that it names",
        )
    address = hold.tables[rank.number] ^ rank.mask
    if not may_be_table(address):
        raise AnswerGone(
            f"request {context.request_id} carries an answer of engine {context.engine_id} from "
            "before it started or woke up anew: what it held then is gone",
            "send the request to P again",
        )
    missed = table.missed[rank.agent, address]
    if missed >= MOST_MISSED:
        table.missed[rank.agent, address] += 1
        if missed % _ASK_ONCE_IN_LOADS:  # what broke for a moment only is noticed
            return None
    vouched = time.monotonic() if request.arrived is None else request.arrived
    ends = rank.lease.granted if rank.lease.heartbeats is None else inf
    return HoldCheck(
        *(table, rank.agent, address, hold.generation, vouched, ends, request.is_read_back),
        is_paced=rank.is_paced,
    )
