"""What was found of the hashes of a worker's peers, and which of these differences it accepts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvpatch.connector.handshake.peer_hash.explanation import Explanation, Search
from kvpatch.connector.handshake.peer_hash.factors import OwnFactors
from kvpatch.connector.handshake.peer_hash.sentences import (
    ACCEPTABLE,
    refusal,
    unexplained,
    unfinished,
)
from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused

#: Whose hashes are remembered: of more peers than a fleet has kinds of.
_MOST_HASHES = 256
#: Characters; of others nothing is kept.
_HASH_LENGTH = 64


@dataclass(eq=False)
class NamedPeers:
    """A worker's; handshakes have threads of their own, each with one peer at a time."""

    _searches: dict[str, Search] = field(default_factory=dict)
    _accepted: dict[int, Explanation] = field(default_factory=dict)

    def judge(self, own: OwnFactors, peer_hash: str, *, checks: bool) -> None:
        """Takes a peer with another hash than ours, or refuses it.

        Args:
            checks: whether somebody here checks what is accepted.

        Raises:
            PeerRefused: it differs in something that is not accepted, or nobody knows in what.
        """
        self.forget()
        if len(peer_hash) != _HASH_LENGTH:
            raise unexplained()
        search = self._search(own, peer_hash)
        if search.found is None:
            raise unexplained() if search.is_over else unfinished()
        found = search.found
        accepted = settings.accepted_factors()
        if not all(ACCEPTABLE.get(name) in accepted for name in found.factors):
            raise refusal(found, accepted)
        if not checks:
            raise PeerRefused(
                f"{settings.ACCEPT} accepts what unlike_engines checks, which KVPATCH_DISABLE "
                "turns off",
                "leave it on",
            )
        self._accepted[threading.get_ident()] = found

    def forget(self) -> None:
        """A handshake begins in this thread, of which nothing is known yet."""
        self._accepted.pop(threading.get_ident(), None)

    def accepted(self) -> Explanation | None:
        """How the peer of this thread's handshake differs; None where it has our hash."""
        return self._accepted.get(threading.get_ident())

    def _search(self, own: OwnFactors, peer_hash: str) -> Search:
        """One for each hash: a peer that is refused is asked again by each of its requests."""
        search = self._searches.get(peer_hash)
        if search is None:
            if len(self._searches) >= _MOST_HASHES:
                del self._searches[next(iter(self._searches))]
            search = self._searches[peer_hash] = Search(own, peer_hash)
        search.go_on()
        return search
