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
from types import SimpleNamespace
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
            secret, is_open = settings.side_channel_key().encode(), settings.side_channel_plain()
            if is_listener and not is_open:
                inside.enter_context(_same_key_alone(context, secret))
            socket = context.socket(socket_type)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, _QUESTION_BYTES if is_listener else _ANSWER_BYTES)
            if is_listener:
                if not is_open:
                    socket.curve_secretkey = secret
                    socket.curve_server = True
                    socket.zap_domain = _DOMAIN.encode()
                    socket.zap_enforce_domain = True  # nobody gets in where nobody looks at keys
                socket.bind(address)
            else:
                if secret and _is_under_key(secret, address):
                    _own_key(socket, secret)
                socket.connect(address)
            yield socket
    finally:
        context.destroy(linger=0)


def _is_under_key(secret: bytes, address: str) -> bool:
    """True if P has the key; refuses one without it, but for while the key is rolled out."""
    has_key = _has_key(secret, address)
    if has_key is None:
        raise nobody_answers(address)
    if not has_key and not settings.side_channel_plain():
        raise PeerRefused(
            f"P at {shown(address)} does not have this engine's side channel key",
            f"set {settings.SIDE_CHANNEL_KEY} to the same file on both sides, or "
            f"{settings.SIDE_CHANNEL_PLAIN}=true on both while the key is rolled out",
        )
    if not has_key:
        _LOG.warning("P at %s is asked without the side channel key, which it lacks", address)
    return has_key


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


@contextmanager
def _same_key_alone(context: zmq.Context[Any], secret: bytes) -> Iterator[None]:
    """Makes sockets of a context that listen under the key take no other key, while inside."""
    import zmq
    from zmq.auth.thread import ThreadAuthenticator

    public = zmq.curve_public(secret)
    allowed = ThreadAuthenticator(context)
    allowed.start()
    try:
        # ZMQ has decoded neither of the two keys.
        same_key = SimpleNamespace(callback=lambda domain, key: key == public)
        allowed.configure_curve_callback(_DOMAIN, same_key)
        yield
    finally:
        allowed.stop()
