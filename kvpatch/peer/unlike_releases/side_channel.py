"""P's side channel: questions in the words of a release, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import Question
from kvpatch.core.text import shown

_GET = b"get_meta_msg"


@dataclass(frozen=True)
class Address:
    """Where a P listens."""

    host: str
    port: int

    @property
    def path(self) -> str:
        """As ZMQ has it."""
        is_bare = ":" in self.host and not self.host.startswith("[")  # vLLM takes both
        host = f"[{self.host}]" if is_bare else self.host
        return f"tcp://{host}:{self.port}"


def question_for(question: Question, rank: int) -> bytes:
    """A question for a rank, of a P without a pipeline."""
    import msgspec

    if question == "at a port":
        return _GET
    ranks = (rank,) if question == "rank" else (0, rank)
    return msgspec.msgpack.encode((_GET, *ranks))


def rank_asked_for(question: Question, message: bytes) -> int:
    """The rank that our own release asks for.

    Raises:
        PeerRefused: it asks for a later stage of a pipeline.
    """
    import msgspec

    of_type = tuple[bytes, int] if question == "rank" else tuple[bytes, int, int]
    _, *stage, rank = msgspec.msgpack.decode(message, type=of_type)
    if any(stage):
        raise PeerRefused(
            "a P of another release is asked for a later stage of its pipeline",
            "use --pipeline-parallel-size 1 on the prefill side",
        )
    return int(rank)


def ask(address: Address, message: bytes) -> list[bytes]:
    """The frames of what P answers.

    Raises:
        PeerRefused: it does not answer in time, or has another side channel key.
    """
    import zmq

    from kvpatch.peer import side_channel_key

    with side_channel_key.side_channel_socket(zmq.REQ, address.path) as asking:
        asking.send(message)
        if not asking.poll(side_channel_key.ANSWER_MS):
            raise side_channel_key.nobody_answers(address.path)
        found: list[bytes] = asking.recv_multipart()
        return found


def fields_of(payload: bytes) -> dict[str, Any]:
    """What P answers or states, by name; nothing else than msgpack's own types comes of it.

    Raises:
        PeerRefused: it is no map of names.
    """
    import msgspec

    try:
        return msgspec.msgpack.decode(payload, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerRefused(
            f"what a P states is no metadata: {shown(str(error))}",
            "use one vLLM and one kvpatch on both sides, and have the proxy pass on P's "
            "remote_host and remote_port",
        ) from error
