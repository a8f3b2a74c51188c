"""The process that all labs of a test process are forked from, with what all releases import.

PyTorch, transformers and what else is not vLLM's own take three quarters of an import of vLLM. The
first lab imports all of it by itself and writes the names down. For the second one the ancestor
imports what these name, once, and from then on a lab imports vLLM alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.forking import die_with_parent, import_all, is_shared

_REPOSITORY = Path(__file__).resolve().parents[2]
_RELEASES_OWN = frozenset({"kvcached", "vllm"})
#: These, and what an engine's process decides on before it imports it.
_NOT_SHARED = _RELEASES_OWN | {"__main__", "kvpatch", "tests"}
#: The names that the first lab has written down, in the ancestor's folder.
_NAMES = "imported.json"
#: What a lab's process prints, in its folder.
LOG = "import.log"
#: Of the ancestor's import, and of a process's end.
_ANSWER_SECONDS = 600.0


class Process:
    """One that the ancestor has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        select.select([self._handle], [], [], _ANSWER_SECONDS)
        os.close(self._handle)


class Ancestor:
    """The tests' side of it. It starts with the first lab, and ends with the tests' process."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kvpatch-lab-ancestor-")

    def fork(self, variables: Mapping[str, str], folder: Path, fd: int) -> Process:
        """Begins a lab's process, which prints to ``import.log`` in its folder.

        Args:
            variables: its environment, all of it.
            folder: that it works in.
            fd: its socket, on which it serves.
        """
        if self._control is None:
            self._control = self._start(variables)
        order = folder / "order.json"
        order.write_text(json.dumps({"variables": dict(variables), "folder": str(folder)}))
        socket.send_fds(self._control, [str(order).encode()], [fd])
        answer = self._control.recv(64)
        if not answer:
            raise RuntimeError(f"the ancestor has ended\n{self._log.read_text(errors='replace')}")
        return Process(int(answer))

    @property
    def _log(self) -> Path:
        return Path(self._folder.name, "ancestor.log")

    def _start(self, variables: Mapping[str, str]) -> socket.socket:
        ours, theirs = socket.socketpair()
        folder = self._folder.name
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.lab.ancestor", str(theirs.fileno()), folder],
                cwd=folder,
                env={**variables, "PYTHONPATH": str(_REPOSITORY), "HOME": folder},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        theirs.close()
        ours.settimeout(_ANSWER_SECONDS)
        return ours


def _serve(fd: int, folder: Path) -> None:
    """Forks a lab for each order on the socket, until it closes."""
    die_with_parent()
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    names = folder / _NAMES
    is_bare = True
    while True:
        message, fds, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            return
        if is_bare and names.exists():
            _import_all(names)
            is_bare = False
        order = json.loads(Path(message.decode()).read_text())
        pid = os.fork()
        if pid == 0:
            control.close()
            run_as_fork(partial(_become_lab, order, fds[0], names))
        os.close(fds[0])
        control.sendall(f"{pid}\n".encode())


def _import_all(names: Path) -> None:
    import_all(json.loads(names.read_text()), _RELEASES_OWN)


def _become_lab(order: Mapping[str, Any], fd: int, names: Path) -> None:
    """Goes on as a process that was started with this environment."""
    from . import child

    folder: str = order["folder"]
    os.environ.clear()
    os.environ.update(order["variables"])
    os.chdir(folder)
    write_to(str(Path(folder, LOG)))
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [folder, *paths, *(path for path in sys.path[1:] if path not in paths)]
    importlib.invalidate_caches()
    child.main(fd, partial(_write_down, names))


def _write_down(names: Path) -> None:
    """Writes down what this process has imported and others may share, where nobody has."""
    if not names.exists():
        written = names.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps([name for name in sys.modules if _is_shared(name)]))
        written.rename(names)


def _is_shared(name: str) -> bool:
    return is_shared(name, _NOT_SHARED)


def write_to(log: str) -> None:
    """Has all that this process prints written to a file."""
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)


def run_as_fork(serve: Callable[[], None]) -> NoReturn:
    """Does what the fork is there for: it must never return into its parent's stack."""
    status = 1
    try:
        serve()
        status = 0
    except EOFError:  # whom it serves has gone
        status = 0
    except BaseException:  # noqa: BLE001 - it ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]))
