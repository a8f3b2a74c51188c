"""Runs a command whose vLLM engines are forked from here, where what vLLM imports is imported.

    python -m tests.serving.engine_ancestor [--imports MODULES] COMMAND ...

An engine is three processes or more, and each takes 15 seconds of a core to import PyTorch,
transformers and the like. These are imported here, once. A process of an engine that the command
starts, or that an engine spawns, then has a fork of this one go on in its place
(``forked_starts/``): with its arguments, environment, folder, files and process group, and with
nothing of vLLM's, kvpatch's or NIXL's, which it imports itself. What has other libraries, or other
variables that they read while they are imported, starts by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forking import die_with_parent, import_all, is_shared

_HERE = Path(__file__).resolve().parent
_SOCKET = "TEST_ENGINE_ANCESTOR"
#: What the libraries read when they are imported; `None`: it must not be set.
_READ_AT_IMPORT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "LD_LIBRARY_PATH": None,
}
#: An engine's own, and what reads more of the environment than the above when it is loaded.
_NOT_SHARED = frozenset({"__main__", "__mp_main__", "kvcached", "kvpatch", "nixl", "tests", "vllm"})
_IMPORTS = "vllm.entrypoints.openai.api_server,vllm.v1.worker.cpu_worker"
_ORDER_BYTES = 1 << 17
#: The most that one message may carry.
_MOST_FDS = 253


@dataclass(frozen=True)
class Order:
    """A process that is to go on as a fork."""

    arguments: list[str]
    variables: dict[str, str]
    folder: str
    fds: list[int]
    group: int
    session: int
    cores: list[int]
    prefix: str
    version: str
    has_no_bytecode: bool

    def why_not(self) -> str:
        """Why it has to start by itself; empty where it need not."""
        if (self.prefix, self.version) != (sys.prefix, sys.version):
            return f"it is of {self.prefix}"
        if self.session != os.getsid(0):
            return "it is of another session, whose process groups a fork cannot join"
        for name, value in _READ_AT_IMPORT.items():
            if self.variables.get(name) != value:
                return f"{name} is {self.variables.get(name)}, and {value} here"
        missing = _not_loaded(self.variables.get("LD_PRELOAD", ""))
        return f"{missing} is not loaded here" if missing else ""


def _not_loaded(libraries: str) -> list[str]:
    """Those of ``LD_PRELOAD`` that are not; vLLM names PyTorch's own OpenMP for a CPU worker."""
    loaded = Path("/proc/self/maps").read_text()
    return [path for path in re.split("[: ]", libraries) if path and f" {path}\n" not in loaded]


class Ancestor:
    """Forks for each order, and tells who has given it how its fork ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._forks: dict[int, socket.socket] = {}
        self.taken = 0
        self.left: list[str] = []

    def serve(self, command: subprocess.Popen[bytes]) -> tuple[Order, list[int]] | None:
        """Until the command has ended: None. In a fork: what it is to go on as."""
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writing)
        self._selector.register(reading, selectors.EVENT_READ)
        while command.returncode is None:
            for key, _ in self._selector.select():
                if key.fd == reading:
                    with contextlib.suppress(BlockingIOError):
                        os.read(reading, 4096)
                elif key.fileobj is self._listener:
                    found = self._take(self._listener.accept()[0])
                    if found is not None:
                        signal.set_wakeup_fd(-1)
                        os.close(reading)
                        os.close(writing)
                        return found
                elif isinstance(key.fileobj, socket.socket):
                    self._pass_on(key.fileobj)
            self._reap(command)
        return None

    def _take(self, control: socket.socket) -> tuple[Order, list[int]] | None:
        """In a fork, what it is to go on as."""
        message, received, _, _ = socket.recv_fds(control, _ORDER_BYTES, _MOST_FDS)
        if not message:  # who asked has been killed
            control.close()
            return None
        order = Order(**json.loads(message))
        reason = order.why_not()
        if reason:
            self.left.append(reason)
            control.send(json.dumps({"is_taken": False}).encode())
            control.close()
        else:
            pid = os.fork()
            if pid == 0:
                self._close()
                control.close()
                return order, received
            with contextlib.suppress(
                PermissionError
            ):  # who asked has been killed, and all of its group
                os.setpgid(pid, order.group)
            self.taken += 1
            self._forks[pid] = control
            self._selector.register(control, selectors.EVENT_READ)
            control.send(json.dumps({"is_taken": True, "group": os.getpgrp()}).encode())
        for fd in received:
            os.close(fd)
        return None

    def _pass_on(self, control: socket.socket) -> None:
        """A signal to a fork; where who stood by is gone, its end."""
        pid = next(pid for pid, its in self._forks.items() if its is control)
        message = control.recv(4096)
        number = json.loads(message)["signal"] if message else signal.SIGKILL
        os.kill(pid, number)
        if not message:
            self._selector.unregister(control)

    def _reap(self, command: subprocess.Popen[bytes]) -> None:
        command.poll()
        for pid, control in tuple(self._forks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._forks[pid]
                with contextlib.suppress(KeyError):
                    self._selector.unregister(control)
                with contextlib.suppress(BrokenPipeError):
                    control.send(json.dumps({"status": status}).encode())
                control.close()

    def _close(self) -> None:
        """In a fork: what is the ancestor's."""
        self._selector.close()
        self._listener.close()
        for control in self._forks.values():
            control.close()


def become(order: Order, received: Sequence[int]) -> None:
    """Goes on as the process that gave the order would have begun."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _put_at(received, order.fds)
    os.sched_setaffinity(0, order.cores)
    os.chdir(order.folder)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(order.variables)
    theirs = filter(None, order.variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = ["", *theirs, *(path for path in sys.path[1:] if path not in own)]
    sys.dont_write_bytecode = order.has_no_bytecode
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _put_at(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives files the numbers that they had where they come from, open for what is executed."""
    free = max(*received, *numbers) + 1
    for place, fd in enumerate(received):
        os.dup2(fd, free + place, inheritable=False)
        os.close(fd)
    for place, number in enumerate(numbers):
        os.dup2(free + place, number)
        os.close(free + place)


def run(order: Order) -> None:
    """What a Python that was started with these arguments does."""
    _, flag, what, *rest = order.arguments
    sys.orig_argv[:] = order.arguments
    sys.argv[:] = [flag, *rest]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty())  # type: ignore[union-attr]
    if flag == "-m":
        sys.path[0] = order.folder
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def _import_shared(modules: Sequence[str]) -> None:
    """Imports what these modules of an engine import, but for what is its own.

    A fork imports them to find out what that is.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        for name in modules:
            importlib.import_module(name)
        names = [name for name in sys.modules if is_shared(name, _NOT_SHARED)]
        with os.fdopen(writing, "w") as file:
            json.dump(names, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = file.read()
    os.waitpid(pid, 0)
    import_all(json.loads(found), ("vllm", "kvpatch"))


def main() -> tuple[Order, list[int]]:
    """Ends with the command; returns in a fork alone."""
    parser = argparse.ArgumentParser(description="Runs a command whose engines are forked from it.")
    parser.add_argument("--imports", default=_IMPORTS, help="modules of an engine, by comma")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    variables = dict(os.environ)
    for name, value in _READ_AT_IMPORT.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    _import_shared(options.imports.split(","))
    folder = tempfile.mkdtemp(prefix="kvpatch-engine-ancestor-")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    paths = (str(_HERE / "forked_starts"), variables.get("PYTHONPATH", ""))
    variables |= {_SOCKET: f"{folder}/socket", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    signal.signal(signal.SIGINT, lambda *_: None)  # the command's, which ends by it
    ancestor = Ancestor(listener)
    running = subprocess.Popen(options.command, env=variables)
    found = ancestor.serve(running)
    if found is not None:
        return found
    shutil.rmtree(folder)
    by_themselves = f"; {len(ancestor.left)} started by themselves" if ancestor.left else ""
    why = "".join(f"\n  {reason}" for reason in sorted(set(ancestor.left)))
    print(
        f"engine ancestor: {ancestor.taken} processes were forked{by_themselves}{why}",
        file=sys.stderr,
    )
    sys.exit(running.returncode)


if __name__ == "__main__":
    _order, _received = main()
    become(_order, _received)
    run(_order)
