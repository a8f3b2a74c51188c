"""A process that has just been started, and lets a fork of the ancestor go on in its place.

It stays, as the one that its parent knows: a signal to it is one to the fork, and it ends as the
fork does. The fork takes its place in the process group: what is sent to all of an engine comes
once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

_PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_ANSWER_BYTES = 4096


def hand_over(address: str, arguments: list[str]) -> None:
    """Returns where the ancestor does not take it: this process then starts as any other.

    Args:
        address: of the ancestor's socket.
        arguments: Python's own first, without flags.
    """
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(address)
    fds = _open_fds(control.fileno())
    order = {
        "arguments": arguments,
        "variables": dict(os.environ),
        "folder": str(Path.cwd()),
        "fds": fds,
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "prefix": sys.prefix,
        "version": sys.version,
        "has_no_bytecode": sys.dont_write_bytecode,
    }
    socket.send_fds(control, [json.dumps(order).encode()], fds)
    answer = json.loads(control.recv(_ANSWER_BYTES))
    if answer["is_taken"]:
        os.setpgid(0, answer["group"])
        _stand_by(control, fds)
    control.close()


def _open_fds(own: int) -> list[int]:
    found = []
    for entry in tuple(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        with contextlib.suppress(OSError):  # the one that has just listed them
            os.fstat(fd)
            if fd != own:
                found.append(fd)
    return sorted(found)


def _stand_by(control: socket.socket, fds: list[int]) -> None:
    """Passes signals on until the fork has ended, and ends in the same way."""
    for number in _PASSED_ON:
        signal.signal(number, lambda sent, _: control.send(json.dumps({"signal": sent}).encode()))
    for fd in fds:
        os.close(fd)
    answer = control.recv(_ANSWER_BYTES)
    status = os.waitstatus_to_exitcode(json.loads(answer)["status"]) if answer else 1
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
