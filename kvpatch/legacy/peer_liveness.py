"""Whether a peer answers at all, where the release would wait for its answer for ever."""

from __future__ import annotations

from kvpatch.core.errors import NoAnswer
from kvpatch.peer.side_channel_key import side_channel_socket

#: As long as 0.11.1, the first release that waits with an end to it, gives a peer.
ANSWER_SECONDS = 5.0


def require_answer(address: str, question: bytes, seconds: float = ANSWER_SECONDS) -> None:
    """Asks a peer's handshake listener once, on a socket of its own.

    Args:
        address: ``tcp://host:port``.
        question: what the release itself asks; the answer is thrown away.

    Raises:
        NoAnswer: nothing came within `seconds`.
        PeerRefused: the peer has another side channel key, or none.
    """
    import zmq

    with side_channel_socket(zmq.REQ, address) as socket:
        socket.send(question)  # queued where nobody is connected
        if not socket.poll(round(seconds * 1000), zmq.POLLIN):
            raise NoAnswer(
                f"the prefill engine's handshake listener at {address} did not answer within "
                f"{seconds:g} s",
                "see whether that engine is alive, and set its VLLM_NIXL_SIDE_CHANNEL_HOST and "
                "_PORT to what this host can reach",
            )
