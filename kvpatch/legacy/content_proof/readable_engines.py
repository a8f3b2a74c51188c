"""Which engines a scheduler loads from, where handshakes do not say all of a peer's blocks.

A worker finds out what a handshake leaves open from a prompt that D computes itself
(:mod:`kvpatch.legacy.content_proof.prover`). So the scheduler has D compute an engine's prompts
until all of its workers have reported that they can read it; P is told of each prompt, as of a
full prefix hit.

A scheduler hears of nothing but received requests. So a report is a name that no request has:
each worker reports it once for each engine, and vLLM hands it on when all workers have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from kvpatch.connector.recent_engines import RecentEngines
from kvpatch.connector.speculative_decoding import reserves_slots
from kvpatch.connector.state import scheduler_state
from kvpatch.core import settings

_CAN_READ = "kvpatch can read "
#: On what a worker has its scheduler hand to peers, and nowhere on the wire.
_MAY_BE_AMBIGUOUS = "kvpatch_peers_may_be_ambiguous"


def report_of(engine_id: str, block_tokens: int) -> str:
    """What a worker reports in place of a request's id.

    Args:
        block_tokens: of the engine's blocks; 0 where that is not known.
    """
    return f"{_CAN_READ}{block_tokens} {engine_id}"


def reports_in(received: Iterable[str]) -> dict[str, tuple[str, int]]:
    """(engine, tokens of its blocks) by report, of those among the received requests."""
    found = {}
    for name in received:
        if name.startswith(_CAN_READ):
            tokens, _, engine_id = name.removeprefix(_CAN_READ).partition(" ")
            found[name] = engine_id, int(tokens)
    return found


class ReadableReports:
    """What one worker has to report; handshakes and steps add to it in threads of their own."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._settled = RecentEngines[None]()
        self._is_heard = False
        self._computed: set[str] = set()

    def compute(self, request_id: str) -> None:
        """Books a request that the engine computes itself: the peer is told, nothing is loaded."""
        self._computed.add(request_id)

    def load(self, request_id: str) -> None:
        """Books a request that is loaded, and may have the name of one that was computed."""
        self._computed.discard(request_id)

    def received(self, reported: set[str] | None, over: set[str]) -> set[str] | None:
        """What is to be reported as received.

        A release reports every request whose handshake failed. One that is computed was
        never waited for, and ends a scheduler that expects it to (0.20).

        Args:
            over: requests that the scheduler has ended.
        """
        computed = self._computed
        found = reported - computed if reported else reported
        self._computed = computed - over
        news = set(self._taken()) if self._is_heard else set()
        return news.union(found or ()) if news else found

    def listen(self) -> None:
        """Books that the scheduler knows reports: one without kvpatch takes them for requests."""
        self._is_heard = True

    def settle(self, engine_id: str, block_tokens: int = 0) -> None:
        """Books an engine of which there is nothing to prove, or nothing more."""
        if engine_id not in self._settled:  # each worker says it once
            self._settled[engine_id] = None
            self._waiting.append(report_of(engine_id, block_tokens))

    def unsettle(self, engine_id: str) -> None:
        """Books an engine that has to be proven anew."""
        self._settled.pop(engine_id, None)

    def is_settled(self, engine_id: str) -> bool:
        return engine_id in self._settled

    def _taken(self) -> Iterator[str]:
        while self._waiting:
            yield self._waiting.popleft()


class ReadableEngines:
    """The engines that all workers of one scheduler can read.

    Args:
        block_tokens: of our own blocks.
        full_blocks_only: whether no partial block is moved (0.10.0).
        allows_none: whether nothing is to be loaded from anybody.
        declared: the tokens of every peer's blocks, where the operator says all that handshakes
            leave open.

    Attributes:
        allows_all: whether there is no peer that the workers would have to prove anything of.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        full_blocks_only: bool = False,
        allows_none: bool = False,
        declared: int | None = None,
    ) -> None:
        self.allows_all = False
        self._declared = declared
        self._block_tokens = block_tokens
        self._full_blocks_only = full_blocks_only
        self._allows_none = allows_none
        self._known = RecentEngines[int]()

    def prove(self, engine_id: str, block_tokens: int) -> None:
        """Books that all workers can read an engine.

        Args:
            block_tokens: of its blocks; 0 for as many as ours.
        """
        self._known[engine_id] = block_tokens or self._block_tokens

    def allow(self, engine_id: str, blocks: int, needed_tokens: int) -> bool:
        """Whether a prompt may be loaded of which an engine names some blocks.

        Args:
            needed_tokens: up to where it would be loaded.
        """
        if self.allows_all:
            return True
        tokens = self._known.get(engine_id, self._declared)
        if tokens is None or self._allows_none or not blocks:
            return False
        return not self._full_blocks_only or blocks * tokens >= needed_tokens


def readable_engines_of(scheduler: Any) -> ReadableEngines:
    """A scheduler's.

    0.10.0 loads a prompt into whole blocks and one more for drafted tokens: it takes the
    last blocks of P's for these, a block off, or ends.
    """
    state = scheduler_state(scheduler)
    found = state.held(ReadableEngines)
    if found is None:
        facts = state.facts
        found = ReadableEngines(
            scheduler.block_size,
            full_blocks_only=facts.loads_whole_blocks_only,
            allows_none=facts.loads_whole_blocks_only and reserves_slots(scheduler.vllm_config),
            declared=_declared(states_layout=facts.states_layout),
        )
        state.hold(found)
    return found


def _declared(*, states_layout: bool) -> int | None:
    """The tokens of every peer's blocks, where nothing is left open beside."""
    has_layout = states_layout or settings.peer_layout() or settings.unstated_layout() == "same"
    return settings.peer_block_size() if has_layout else None


def tell_scheduler(metadata: Any, *, may_be_ambiguous: bool) -> None:
    """Has a worker's scheduler know whether peers' handshakes may leave something open.

    A worker without kvpatch says nothing, and could prove nothing: what it would read wrongly it
    cannot unpickle (:mod:`kvpatch.connector.unpatched_workers`), and the rest is not kept from it.

    Args:
        metadata: what the worker has its scheduler hand to peers.
    """
    setattr(metadata, _MAY_BE_AMBIGUOUS, may_be_ambiguous)


def hear_workers(scheduler: Any, metadata: Iterable[Any]) -> None:
    """Books what all workers have said by :func:`tell_scheduler`; peers are not told of it."""
    said = [vars(one).pop(_MAY_BE_AMBIGUOUS, False) for one in metadata]
    if said and not any(said):
        readable_engines_of(scheduler).allows_all = True
