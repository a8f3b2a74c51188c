"""P's side channel: what a D of a release asks there, and whether anybody answers."""

from __future__ import annotations

import msgspec
import zmq
from packaging.version import Version

GET = b"get_meta_msg"
_ANSWER_MS = 1500
#: Of a P that is asked whether it still listens; on a busy machine an answer takes its time.
_PATIENCE_MS = 5000


def question(release: str, rank: int) -> bytes:
    """As a D of this release asks for a rank."""
    if Version(release) < Version("0.11.1"):
        return GET
    ranks = (rank,) if Version(release) < Version("0.26") else (0, rank)
    return msgspec.msgpack.encode((GET, *ranks))


def ask(
    port: int, *frames: bytes, answer_ms: int = _ANSWER_MS, keys: tuple[bytes, bytes] | None = None
) -> list[bytes] | None:
    """The answer's frames; None where there is none in time.

    Args:
        keys: the secrets of who is asked, as the client knows it, and of the client; None to ask
            without.
    """
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as asking:
            asking.linger = 0  # where nobody listens
            if keys is not None:
                server, client = keys
                asking.curve_serverkey = zmq.curve_public(server)
                asking.curve_secretkey = client
                asking.curve_publickey = zmq.curve_public(client)
            asking.connect(f"tcp://127.0.0.1:{port}")
            asking.send_multipart(frames)
            return asking.recv_multipart() if asking.poll(answer_ms) else None
    finally:
        context.destroy(linger=0)


def ask_patiently(port: int, *frames: bytes) -> list[bytes] | None:
    """The same of a P that is expected to answer."""
    return ask(port, *frames, answer_ms=_PATIENCE_MS)


def is_listening(release: str, port: int) -> bool:
    """Whether a P of this release answers a D of its own release for its first rank."""
    return ask_patiently(port, b"", question(release, 0)) is not None
