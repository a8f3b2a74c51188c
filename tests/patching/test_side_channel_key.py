"""The side channel's sockets under a key, without an engine: strangers at P's port, and at D's.

The lab plays them at the listener of each release (tests/lab/test_side_channel_key.py).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import zmq

from kvpatch.core.errors import PeerRefused, SettingsError
from kvpatch.core.settings import SIDE_CHANNEL_KEY
from kvpatch.patches.side_channel_key import PATCH
from kvpatch.peer import side_channel_key
from kvpatch.peer.side_channel_key import side_channel_socket
from tests.strangers import FIRST_BYTES, sent_of_a_large_frame

_MOST = 2**27
#: However slow the machine is.
_PATIENCE_MS = 120_000


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(side_channel_key, "ANSWER_MS", _PATIENCE_MS)
    monkeypatch.setattr(side_channel_key, "_HANDSHAKE_MS", _PATIENCE_MS)
    path = tmp_path / "key"
    path.write_bytes(zmq.curve_keypair()[1])
    monkeypatch.setenv(SIDE_CHANNEL_KEY, str(path))
    return path


@contextmanager
def _listening() -> Iterator[int]:
    """P's listener under the key, at a port, answers each question."""
    ends, ports = threading.Event(), Queue[int]()

    def _serve() -> None:
        with side_channel_socket(zmq.ROUTER, "tcp://127.0.0.1:0") as listening:
            ports.put(int(listening.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":")[-1]))
            while not ends.is_set():
                if listening.poll(20):
                    who, *_ = listening.recv_multipart()
                    listening.send_multipart((who, b"", b"answer"))

    thread = threading.Thread(target=_serve)
    thread.start()
    try:
        yield ports.get(timeout=60)
    finally:
        ends.set()
        thread.join()


def asked(port: int) -> bytes:
    with side_channel_socket(zmq.REQ, f"tcp://127.0.0.1:{port}") as asking:
        asking.send(b"good")
        assert asking.poll(_PATIENCE_MS)
        found: bytes = asking.recv()
        return found


@pytest.mark.parametrize("bounded", [True, False])
def test_no_memory_grows_by_a_strangers_frame(
    monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """The control takes in all that is sent, before it knows whether the peer has the key."""
    if not bounded:
        monkeypatch.setattr(side_channel_key, "_QUESTION_BYTES", -1)
    with _listening() as port:
        sent = sent_of_a_large_frame(port, _MOST)

        assert (sent < _MOST) is bounded
        assert not bounded or asked(port) == b"answer"


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel_key, "_HANDSHAKE_MS", 100)
    with _listening() as port:
        silent = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(200)]
        for one in silent:
            with one:
                while one.recv(100):
                    pass


def test_who_looks_at_keys_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then none gets in, not even who has the key."""

    @contextmanager
    def _nobody(context: Any, secret: bytes) -> Iterator[None]:
        yield

    monkeypatch.setattr(side_channel_key, "_same_key_alone", _nobody)
    with _listening() as port, pytest.raises(PeerRefused, match="does not have this engine's"):
        asked(port)


@contextmanager
def _impostor(first: bytes) -> Iterator[int]:
    """Listens at a port, sends each who comes some bytes, and waits until they go."""
    listening = socket.create_server(("127.0.0.1", 0))

    def _serve() -> None:
        while True:
            try:
                who, _ = listening.accept()
            except OSError:
                return
            with who:
                try:
                    who.sendall(first)
                    while who.recv(2**16):
                        pass
                except OSError:
                    pass

    thread = threading.Thread(target=_serve, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(60)


_OTHERS = [FIRST_BYTES[name] for name in FIRST_BYTES if name not in ("ZMTP 1.0", "noise")]


@pytest.mark.parametrize("first", [*_OTHERS, b""])
def test_d_refuses_an_impostor(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    """And who is silent."""
    monkeypatch.setattr(side_channel_key, "ANSWER_MS", 300)
    reasons = "nobody answers at"
    if first:
        reasons = f"does not have this engine's side channel key|{reasons}"
    with _impostor(first) as port, pytest.raises(PeerRefused, match=reasons):
        asked(port)


def test_a_rotated_key_is_another_one_until_p_starts_anew(key: Path) -> None:
    with _listening() as port:
        key.write_text(f"{zmq.curve_keypair()[1].decode()}\r\n")
        with pytest.raises(PeerRefused, match="does not have this engine's side channel key"):
            asked(port)
    with _listening() as port:
        assert asked(port) == b"answer"


def test_a_pyzmq_without_curve_is_named_when_the_patch_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert PATCH.switch is not None and PATCH.switch.read() == "on"
    monkeypatch.setattr(zmq, "has", lambda what: False)
    with pytest.raises(SettingsError, match="this pyzmq was built without CURVE"):
        PATCH.switch.read()
    monkeypatch.delenv(SIDE_CHANNEL_KEY)
    assert PATCH.switch.read() == "off"
