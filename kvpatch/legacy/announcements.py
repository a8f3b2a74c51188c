"""How workers tell their scheduler which engines can be read, and what it makes of that.

A scheduler hears of nothing but received requests. So each worker reports a name that
no request has, once for each engine, and it is heard when all have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvpatch.connector.recent import Recent

_ANNOUNCED = "kvpatch can read "


def announcement(engine_id: str, block_tokens: int) -> str:
    """What stands in place of a request's id.

    Args:
        block_tokens: of the engine's blocks; 0 where that is not known.
    """
    return f"{_ANNOUNCED}{block_tokens} {engine_id}"


def announced(reported: Iterable[str]) -> dict[str, tuple[str, int]]:
    """(engine, tokens of its blocks) by announcement, of those among reported requests."""
    found = {}
    for name in reported:
        if name.startswith(_ANNOUNCED):
            tokens, _, engine_id = name.removeprefix(_ANNOUNCED).partition(" ")
            found[name] = engine_id, int(tokens)
    return found


class Announcements:
    """What one worker has to announce; handshakes and steps add to it in threads of their own."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._settled = Recent[None]()
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
        """Books that the scheduler knows announcements: one without kvpatch takes them for ids."""
        self._is_heard = True

    def settle(self, engine_id: str, block_tokens: int = 0) -> None:
        """Books an engine of which there is nothing to prove, or nothing more."""
        if engine_id not in self._settled:  # each worker says it once
            self._settled[engine_id] = None
            self._waiting.append(announcement(engine_id, block_tokens))

    def unsettle(self, engine_id: str) -> None:
        """Books an engine that has to be proven anew."""
        self._settled.pop(engine_id, None)

    def is_settled(self, engine_id: str) -> bool:
        return engine_id in self._settled

    def _taken(self) -> Iterator[str]:
        while self._waiting:
            yield self._waiting.popleft()


class Introductions:
    """The engines that all workers can read.

    Args:
        block_tokens: of our own blocks.
        full_blocks_only: whether no partial block is moved (0.10.0).
        allows_none: whether nothing is to be loaded from anybody.
        declared: the tokens of every peer's blocks, where the operator says all that handshakes
            leave open.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        full_blocks_only: bool = False,
        allows_none: bool = False,
        declared: int | None = None,
    ) -> None:
        self._declared = declared
        self._block_tokens = block_tokens
        self._full_blocks_only = full_blocks_only
        self._allows_none = allows_none
        self._known = Recent[int]()

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
        tokens = self._known.get(engine_id, self._declared)
        if tokens is None or self._allows_none or not blocks:
            return False
        return not self._full_blocks_only or blocks * tokens >= needed_tokens
