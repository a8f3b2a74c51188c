"""Stands between our release's handshake and a P of another release, for as long as it lasts.

The release is told that P listens here, on this machine. What it asks is asked of P in P's own
words; what P answers it is told in ours. Its checks and its books stay its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.peer.side_channel_key import listen_under_key
from kvpatch.peer.unlike_releases.peer_releases import (
    Releases,
    Statement,
    question_of,
    releases_by_fields,
    speak_alike,
)
from kvpatch.peer.unlike_releases.side_channel import (
    Address,
    ask,
    fields_of,
    question_for,
    rank_asked_for,
)
from kvpatch.peer.unlike_releases.translation import translated

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
        """What our release is answered.

        Raises:
            PeerRefused: P does not answer, or with what no release of the table does.
        """
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
    """The middle of a question's way: the clock of a P that does not tell its own is ours."""
    return (asked + time.perf_counter()) / 2


class Interpreter:
    """Answers our release while inside, in a thread of its own::

        with Interpreter(interpretation) as here:
            release.handshake(HOST, here.port)

    Raises:
        PeerRefused: at the end, what P was refused for; the release knows a bad answer alone.
    """

    def __init__(self, interpretation: Interpretation) -> None:
        self._interpretation = interpretation
        self._refusal: PeerRefused | None = None
        self._ends = threading.Event()

    def __enter__(self) -> Interpreter:
        import zmq

        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        listen_under_key(self._socket)
        self.port: int = self._socket.bind_to_random_port(f"tcp://{HOST}")
        self._thread = threading.Thread(target=self._serve, name="kvpatch-handshake", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._thread.join()
        self._context.destroy(linger=0)
        if self._refusal is not None:
            raise self._refusal from None

    def _serve(self) -> None:
        import msgspec

        while not self._ends.is_set():
            if not self._socket.poll(_LOOK_MS):
                continue
            who, *between, message = self._socket.recv_multipart()
            try:
                answer = self._interpretation.answer(message)
            except PeerRefused as refusal:
                self._refusal, answer = refusal, [b""]
            except msgspec.MsgspecError:  # somebody else on this machine asks
                answer = [b""]
            self._socket.send_multipart([who, *between, *answer])
