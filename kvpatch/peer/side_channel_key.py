"""The side channel under a key: P answers nobody else, and D asks nobody else.

ZMQ's own CURVE, with one key pair for all engines: ``KVPATCH_SIDE_CHANNEL_KEY`` names its file.
P is CURVE's server. It shows by the key that it is P, and takes no client but one of the same key.
ZMQ cuts off whoever has another key, or none, before a message of theirs is read.

While the key is rolled out (``KVPATCH_SIDE_CHANNEL_PLAIN=true``) P listens without it, and D asks
each P whether it has the key, and goes on without where it has not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.core.text import shown

if TYPE_CHECKING:
    import zmq

_LOG = logging.getLogger("kvpatch.side_channel_key")

#: Before the release's own 5 seconds are over.
ANSWER_MS = 4500
#: How long a client may be silent before ZMQ knows that it has the key; 30 s are ZMQ's default.
_HANDSHAKE_MS = 5000
#: Larger frames end a connection. ZMQ takes them in before it knows whether the peer has the key.
_QUESTION_BYTES = 2**16
_ANSWER_BYTES = 2**28
_DOMAIN = "kvpatch"


@contextmanager
def side_channel_socket(socket_type: int, address: str) -> Iterator[Any]:
    """Yields a socket that listens at an address (ROUTER) or asks there (REQ).

    Under the key, where there is one.

    Raises:
        PeerRefused: P has another key, or none, or does not answer.
    """
    import zmq

    context: Any = zmq.Context()
    try:
        with ExitStack() as inside:
            is_listener = socket_type == zmq.ROUTER
            is_open = settings.side_channel_plain()
            if is_listener and not is_open:
                inside.enter_context(_same_key_alone(context))
            socket = context.socket(socket_type)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, _QUESTION_BYTES if is_listener else _ANSWER_BYTES)
            if is_listener:
                if not is_open:
                    listen_under_key(socket)
                    socket.zap_domain = _DOMAIN.encode()
                    socket.zap_enforce_domain = True  # nobody gets in where nobody looks at keys
                socket.bind(address)
            else:
                _ask_under_key(socket, address)
                socket.connect(address)
            yield socket
    finally:
        context.destroy(linger=0)


def listen_under_key(socket: Any) -> None:
    """Sets the key, if there is one, on a listening socket that is not bound yet."""
    secret = settings.side_channel_key().encode()
    if secret:
        socket.curve_secretkey = secret
        socket.curve_server = True


def _ask_under_key(socket: Any, address: str) -> None:
    """Sets the key, if any, on a socket that is not connected yet; refuses a P without it."""
    secret = settings.side_channel_key().encode()
    if not secret:
        return
    has_key = _has_key(secret, address)
    if has_key:
        _own_key(socket, secret)
    elif has_key is None:
        raise nobody_answers(address)
    elif not settings.side_channel_plain():
        raise PeerRefused(
            f"P at {shown(address)} does not have this engine's side channel key",
            f"set {settings.SIDE_CHANNEL_KEY} to the same file on both sides, or "
            f"{settings.SIDE_CHANNEL_PLAIN}=true on both while the key is rolled out",
        )
    else:
        _LOG.warning("P at %s is asked without the side channel key, which it lacks", address)


def nobody_answers(address: str) -> PeerRefused:
    """Returns the refusal of a P that does not answer in time."""
    return PeerRefused(
        f"nobody answers at {shown(address)}",
        "see whether P is there, and set its VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT to what this "
        "host can reach; one whose listener has ended has to be restarted",
    )


def _own_key(socket: Any, secret: bytes) -> None:
    import zmq

    socket.curve_secretkey = secret
    socket.curve_publickey = socket.curve_serverkey = zmq.curve_public(secret)


def _has_key(secret: bytes, address: str) -> bool | None:
    """True if the peer that listens at an address has the key; None if nobody answers in time."""
    import zmq
    from zmq.utils.monitor import recv_monitor_message

    context: Any = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.setsockopt(zmq.MAXMSGSIZE, _QUESTION_BYTES)
        _own_key(socket, secret)
        failures = (
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | failures)
        socket.connect(address)
        if not monitor.poll(ANSWER_MS):
            return None
        found: bool = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return found
    finally:
        context.destroy(linger=0)


class _SameKey:
    """Tells ZMQ which clients' keys are right."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns True for the key of all engines; ZMQ has decoded neither of the two."""
        return key == self._public


@contextmanager
def _same_key_alone(context: zmq.Context[Any]) -> Iterator[None]:
    """Makes sockets of a context that listen under the key take no other key, while inside."""
    import zmq
    from zmq.auth.thread import ThreadAuthenticator

    secret = settings.side_channel_key().encode()
    allowed = ThreadAuthenticator(context)
    allowed.start()
    try:
        allowed.configure_curve_callback(_DOMAIN, _SameKey(zmq.curve_public(secret)))
        yield
    finally:
        allowed.stop()
