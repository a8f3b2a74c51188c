"""Stands between our release's handshake and a P of another release, for as long as it lasts.

The release is told that P listens here, on this machine. What it asks is asked of P in P's own
words; what P answers it is told in ours. Its checks and its books stay its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from kvpatch.peer.side_channel_key import listen_under_key

HOST = "127.0.0.1"
_LOOK_MS = 50


@dataclass(frozen=True)
class Interpretation:
    """Who speaks with whom.

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
        return [payload, clock[0] if clock else msgspec.msgpack.encode(_between(asked))]

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


_METADATA = "agent_metadata_bytes"


def _between(asked: float) -> float:
    """Returns the middle of a question's way, for the clock of a P that does not tell its own."""
    return (asked + time.perf_counter()) / 2


@contextmanager
def interpreting(interpretation: Interpretation) -> Iterator[int]:
    """Yields a port at which a thread answers our release in P's place::

        with interpreting(interpretation) as port:
            release.handshake(HOST, port)

    At the end it raises what P was refused for; the release knows a bad answer alone.
    """
    import zmq

    context: Any = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    listen_under_key(socket)
    port = socket.bind_to_random_port(f"tcp://{HOST}")
    ends, refusals = threading.Event(), list[PeerRefused]()
    told = interpretation, socket, ends, refusals
    thread = threading.Thread(target=_serve, args=told, name="kvpatch-handshake", daemon=True)
    thread.start()
    try:
        yield port
    finally:
        ends.set()
        thread.join()
        context.destroy(linger=0)
        if refusals:
            raise refusals[-1] from None


def _serve(
    interpretation: Interpretation,
    socket: Any,
    ends: threading.Event,
    refusals: list[PeerRefused],
) -> None:
    import msgspec

    while not ends.is_set():
        if not socket.poll(_LOOK_MS):
            continue
        who, *between, message = socket.recv_multipart()
        try:
            answer = interpretation.answer(message)
        except PeerRefused as refusal:
            refusals.append(refusal)
            answer = [b""]
        except msgspec.MsgspecError:  # somebody else on this machine asks
            answer = [b""]
        socket.send_multipart([who, *between, *answer])
