"""Two network namespaces and a line between them: what is sent is late, lost, or not sent at all.

The namespaces are this process's own, and gone with it. In each is one interface (TUN), and a
thread here carries packets from the one to the other. ``tc`` would do the same, where the kernel
has netem, and many have not.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

#: The settings of an engine in a namespace.
NAMESPACE = "LAB_NAMESPACE"
HOST = "LAB_HOST"
_LINE = "LAB_LINE"

_NEW_NETWORK = 0x40000000
_NEW_MOUNTS = 0x00020000
_PRIVATE = 0x4000 | 0x40000  # and all below it
_TUN_SET = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_DEVICE = "kvline0"
_HOSTS = ("10.203.0.1", "10.203.0.2")
_PACKET_BYTES = 65536
_LIBC = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


class NoNamespaces(RuntimeError):
    """This machine lets nobody make one; says why."""


def enter(path: str) -> None:
    """Puts the calling thread, and all that it starts, into a namespace."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _call("setns", descriptor, _NEW_NETWORK)
    finally:
        os.close(descriptor)


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def own_network() -> int:
    """Puts the calling thread into a new namespace; what keeps that open."""
    _call("unshare", _NEW_NETWORK)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def in_thread(function: Callable[[], T]) -> T:
    """What a thread of its own returns: the namespace is a thread's."""
    found: list[T] = []
    raised: list[OSError | subprocess.CalledProcessError] = []

    def run() -> None:
        try:
            found.append(function())
        except (OSError, subprocess.CalledProcessError) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


def _make(host: str) -> tuple[int, int]:
    """(the namespace, the line's end in it), with its interface up; in a thread of its own."""
    space = own_network()
    line = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(line, _TUN_SET, struct.pack("16sH22x", _DEVICE.encode(), _TUN_WITHOUT_HEADER))
    for command in (
        "ip link set lo up",
        f"ip address add {host}/24 dev {_DEVICE}",
        f"ip link set {_DEVICE} mtu 9000 up",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)
    # A peer that is not there is given up after seconds, and not after a quarter of an hour.
    Path("/proc/sys/net/ipv4/tcp_retries2").write_text("3")
    return space, line


class Line:
    """Carries packets between two namespaces, in a thread.

    Args:
        delay_seconds: that each packet is on its way.
        loss: how many of them never arrive, of 1.
    """

    def __init__(self, delay_seconds: float, loss: float) -> None:
        self._delay_seconds, self._loss = delay_seconds, loss
        self._chance = random.Random(1)
        self._name = uuid.uuid4().hex  # no process of an earlier line's is hired again
        self._is_cut = self._is_over = False
        self.carried = self.lost = 0
        self._ends = [in_thread(partial(_make, host)) for host in _HOSTS]
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def settings(self, end: int) -> tuple[tuple[str, str], ...]:
        """Of an engine at the first end (0) or the second (1)."""
        return (
            (NAMESPACE, f"/proc/{os.getpid()}/fd/{self._ends[end][0]}"),
            (_LINE, self._name),
            (HOST, _HOSTS[end]),
            ("UCX_TLS", "self,tcp"),
            ("UCX_NET_DEVICES", _DEVICE),
            ("UCX_TCP_KEEPIDLE", "1s"),
            ("UCX_TCP_KEEPINTVL", "1s"),
            ("UCX_TCP_KEEPCNT", "2"),
        )

    def cut(self) -> None:
        """From now on nothing arrives."""
        self._is_cut = True

    def mend(self) -> None:
        """From now on packets arrive again."""
        self._is_cut = False

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        for namespace, line in self._ends:
            os.close(line)
            os.close(namespace)

    def _carry(self) -> None:
        lines = [line for _, line in self._ends]
        other = dict(zip(lines, reversed(lines), strict=True))
        under_way: list[tuple[float, int, int, bytes]] = []
        while not self._is_over:
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, _, line, packet = heapq.heappop(under_way)
                _write(line, packet)
            wait = min(0.05, under_way[0][0] - now) if under_way else 0.05
            for line in select.select(lines, (), (), max(0.0, wait))[0]:
                for packet in _packets(line):
                    if self._is_cut or self._chance.random() < self._loss:
                        self.lost += 1
                        continue
                    self.carried += 1
                    due = time.monotonic() + self._delay_seconds
                    heapq.heappush(under_way, (due, self.carried, other[line], packet))


def _packets(line: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(line, _PACKET_BYTES)
        except BlockingIOError:
            return


def _write(line: int, packet: bytes) -> None:
    try:
        os.write(line, packet)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EAGAIN):  # an interface that is down, or full
            raise


@contextmanager
def line(delay_seconds: float = 0.0, loss: float = 0.0) -> Iterator[Line]:
    """Two namespaces with a line between them.

    Raises:
        NoNamespaces: they are not to be had here.
    """
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no command ip (iproute2)")
    try:
        made = Line(delay_seconds, loss)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoNamespaces(f"network namespaces and TUN are not to be had: {error}") from error
    try:
        yield made
    finally:
        made.close()


def enter_as_told(environment: Any) -> None:
    """In an engine's process, before it starts a thread: into the namespace of its settings."""
    path = environment.get(NAMESPACE)
    if not path:
        return
    enter(path)
    # UCX finds interfaces in /sys, which shows those of the namespace that mounted it.
    _call("unshare", _NEW_MOUNTS)
    _call("mount", None, b"/", None, _PRIVATE, None)
    _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
