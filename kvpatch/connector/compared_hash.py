"""The worker's own compatibility hash, which says how another one differs when it is compared.

The release compares the two in the thread of the handshake, before it decodes anything else of
the peer, and raises where they are not equal.
"""

from __future__ import annotations

import logging

from kvpatch.connector.handshake.peer_hash.factors import OwnFactors, own_factors
from kvpatch.connector.handshake.peer_hash.named_peers import NamedPeers
from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.connector.metrics.book import Book
from kvpatch.connector.state import worker_state
from kvpatch.core import settings

_LOG = logging.getLogger("kvpatch.named_factors")


class ComparedHash(str):
    """A hash that a peer's is compared with: one that is accepted counts as equal."""

    _own: OwnFactors
    _peers: NamedPeers
    _book: Book
    _checks: bool

    __slots__ = ("_book", "_checks", "_own", "_peers")

    @classmethod
    def of(cls, own: OwnFactors, peers: NamedPeers, book: Book, *, checks: bool) -> ComparedHash:
        """This engine's.

        Args:
            checks: whether somebody here checks what is accepted.
        """
        made = cls(own.digest)
        made._own, made._peers, made._book, made._checks = own, peers, book, checks
        return made

    def __eq__(self, other: object) -> bool:
        """Raises:
        PeerRefused: the other is a peer's, and its engine differs in what is not accepted.
        """
        if not isinstance(other, str):
            return False
        if str.__eq__(self, other):
            self._peers.forget()
            return True
        with self._book.refusals():
            self._peers.judge(self._own, str(other), checks=self._checks)
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def compare_by_factor(release: ReleaseWorker, *, checks: bool) -> bool:
    """Has a worker that has registered say how its peers differ; what peers are told stays.

    Returns:
        False where its own hash is made of something that is not known here.
    """
    own = own_factors(release)
    if own is None:
        _LOG.warning(
            "this engine's compatibility hash is made of something that kvpatch does not know: how "
            "peers differ is not said, and %s accepts nothing",
            settings.ACCEPT,
        )
        return False
    state = worker_state(release.worker)
    peers = state.of(NamedPeers)
    release.worker.compat_hash = ComparedHash.of(own, peers, state.book, checks=checks)
    return True
