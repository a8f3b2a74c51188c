"""Strangers on the side channel's port: the first bytes that no engine with the key sends."""

from __future__ import annotations

import random
import socket
import struct


def _greeting(mechanism: bytes, *, is_server: bool = False) -> bytes:
    """The first 64 bytes of ZMTP 3.1."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes([is_server]) + bytes(31)


def _noise(length: int) -> bytes:
    return random.Random(length).randbytes(length)


_CURVE = _greeting(b"CURVE")
_LONG = b"\x06"  # a command whose length has eight bytes

#: What a stranger sends first, by what it is.
FIRST_BYTES = {
    "ZMTP 1.0": b"\x01\x00\x01\x00\x0dget_meta_msg",
    "ZMTP 2.0": b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00\x00\x0cget_meta_msg",
    "no key": _greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03REQ",
    "a password": _greeting(b"PLAIN") + b"\x04\x0a\x05HELLO\x01a\x01b",
    "an unknown mechanism": _greeting(b"GUESS"),
    "a server": _greeting(b"CURVE", is_server=True) + b"\x04\x06\x05READY",
    "a false hello": _CURVE + b"\x04\xc8\x05HELLO\x01\x00" + _noise(192),
    "a short hello": _CURVE + b"\x04\x06\x05HELLO",
    "no hello": _CURVE + _LONG + struct.pack(">Q", 257) + b"\x08INITIATE" + _noise(248),
    "a message": _CURVE + b"\x00\x0cget_meta_msg",
    "many messages": _CURVE + b"\x01\x0cget_meta_msg" * 1000,
    "more than there is": _CURVE + _LONG + struct.pack(">Q", 2**63 - 1) + b"x",
    "8 GiB": _CURVE + _LONG + struct.pack(">Q", 2**33) + b"x",
    "HTTP": b"GET / HTTP/1.1\r\nHost: p\r\n\r\n",
    "noise": _noise(5000),
}


def answer_to(port: int, sent: bytes, seconds: float = 60) -> bytes:
    """All that comes back before the connection is closed; none is to stay open for long."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as stranger:
        found = b""
        try:
            stranger.sendall(sent)
            while more := stranger.recv(2**16):
                found += more
        except (ConnectionResetError, BrokenPipeError):
            pass
        return found


def sent_of_a_large_frame(port: int, most: int) -> int:
    """How many bytes of a frame of 8 GiB are taken in before the connection is closed."""
    part, sent = bytes(2**20), 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
        try:
            stranger.sendall(FIRST_BYTES["8 GiB"])
            while sent < most:
                stranger.sendall(part)
                sent += len(part)
        except (ConnectionResetError, BrokenPipeError):
            pass
    return sent
