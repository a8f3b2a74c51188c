"""Stands between our release's handshake and a P of another release, for as long as it lasts.

The release is handed this in place of a socket. What it asks is asked of P in P's own words; what P
answers it is told in ours. Its checks and its books stay its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.peer.other_releases import (
    Address,
    Releases,
    Statement,
    ask,
    fields_of,
    question_for,
    question_of,
    rank_asked_for,
    releases_by_fields,
    speak_alike,
    translated,
)

_METADATA = "agent_metadata_bytes"


@dataclass(frozen=True)
class Interpretation:
    """The two ends of a handshake that is interpreted.

    Attributes:
        peer: where P listens.
        releases: that it may be of.
        own: of our release.
        own_hash: what P states too, where it is of our release and configured alike.
        backend: our attention backend.
        tell: what becomes of what a rank has stated; None for one that speaks as we do.
    """

    peer: Address
    releases: Releases
    own: ReleaseFacts
    own_hash: str
    backend: str
    tell: Callable[[int, Statement | None], None]

    def answer(self, message: bytes) -> list[bytes]:
        """Returns what our release is answered."""
        import msgspec

        rank = rank_asked_for(self.own.question, message)
        question = question_of(self.releases)
        if question is None:
            raise PeerRefused("nobody knows how to ask this P", "use one vLLM on both sides")
        asked = time.perf_counter()
        payload, *clock = ask(self.peer, question_for(question, rank))
        payload = self._payload(rank, fields_of(payload), payload)
        if self.own.question != "stage and rank":
            return [payload]
        # The middle of a question's way, for the clock of a P that does not tell its own.
        between = msgspec.msgpack.encode((asked + time.perf_counter()) / 2)
        return [payload, clock[0] if clock else between]

    def _payload(self, rank: int, stated: dict[str, Any], payload: bytes) -> bytes:
        import msgspec

        peer_hash, metadata = (stated.get(n) for n in ("compatibility_hash", _METADATA))
        if not isinstance(peer_hash, str) or not isinstance(metadata, bytes):
            raise PeerRefused(
                "P states no compatibility hash, by which its model would be known",
                "use vLLM 0.13 or later on both sides",
            )
        fields = fields_of(metadata)
        releases = releases_by_fields(self.releases, fields)
        if not releases:
            raise PeerRefused(
                f"P states {shown(sorted(fields))}, as no vLLM that kvpatch knows and that answers "
                "requests as it does",
                "use one vLLM on both sides",
            )
        if self.own_hash == peer_hash or speak_alike(releases, self.own):
            self.tell(rank, None)
            return payload
        statement = Statement(releases, fields)
        self.tell(rank, statement)
        ours = translated(statement, self.own, self.backend)
        return msgspec.msgpack.encode(
            {"compatibility_hash": peer_hash, _METADATA: msgspec.msgpack.encode(ours)}
        )


class InterpretedSocket:
    """Stands for the socket at which our release asks P."""

    def __init__(self, interpretation: Interpretation) -> None:
        self._interpretation, self._frames = interpretation, list[bytes]()

    def setsockopt(self, *_: int) -> None:
        """Sets nothing: P is asked in a time of kvpatch's own."""

    def send(self, message: bytes) -> None:
        """Asks P what the release asks, and keeps the answer.

        Raises:
            PeerRefused: P does not answer, or as no release that is known.
        """
        self._frames = self._interpretation.answer(message)

    def recv(self) -> bytes:
        """Returns what the release is answered."""
        return self._frames[0]

    def recv_multipart(self) -> list[bytes]:
        """Returns that with P's clock behind it, from 0.26 on."""
        return self._frames
