"""The processes of a release: one that imports, and engines forked from it.

The importing process answers each socket it is sent with a fork that serves
it. An engine process serves any number of cases, as P or as D; whether
kvpatch is on is decided once, before it imports the connector.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

from tests.forking import die_with_parent
from tests.releases import kvcached

from . import disguise
from .ancestor import run_as_fork, write_to
from .engine_api import Failure, Fork
from .namespaces import enter_as_told

#: The setting that says when kvcached's own NIXL patch is applied: before kvpatch, or after.
KVCACHEDS_OWN = "LAB_KVCACHEDS_OWN_PATCH"
_LAB = str(Path(__file__).resolve().parent)


def main(fd: int, is_ready: Callable[[], None]) -> None:
    """Serves fork requests on the Unix socket `fd` until it closes.

    Args:
        is_ready: called when all is imported, before the first fork.
    """
    die_with_parent()
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    from . import release

    release.preload()
    is_ready()
    # What has been imported is never garbage: the engines collect after each case.
    gc.collect()
    gc.freeze()
    control.sendall(b"ready\n")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            run_as_fork(partial(_engine_process, Connection(fds[0]), message))
        os.close(fds[0])
        control.sendall(f"{pid}\n".encode())


def _engine_process(connection: Connection, message: bytes) -> None:
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fork: Fork = pickle.loads(message)
    write_to(fork.log_path)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the host asks a hung engine where it is
    os.environ.update(fork.settings)
    enter_as_told(os.environ)
    disguise.take_version()
    theirs = os.environ.get(KVCACHEDS_OWN, "")
    if theirs == "before":
        _apply_kvcacheds_own()
    if fork.patched:
        _enable_kvpatch(fork.patches)
    if theirs == "after":
        _apply_kvcacheds_own()
    _serve(connection)


def _apply_kvcacheds_own() -> None:
    """Applies the NIXL patch of kvcached's source distribution, as it is, to the release."""
    sys.path.append(str(kvcached.tree(kvcached.NEWEST)))
    os.environ["ENABLE_KVCACHED"] = "true"
    from kvcached.integration.vllm import nixl_compat

    if not nixl_compat.patch_nixl_connector():
        raise RuntimeError("kvcached did not apply its own patch")


def _enable_kvpatch(patches: tuple[str, ...]) -> None:
    import kvpatch
    from kvpatch.patches import SLUGS

    os.environ["ENABLE_KVPATCH"] = "true"
    if patches:
        unknown = set(patches) - set(SLUGS)
        if unknown:
            raise ValueError(f"no such patches: {sorted(unknown)}; there are {SLUGS}")
        os.environ["KVPATCH_DISABLE"] = ",".join(s for s in SLUGS if s not in patches)
    kvpatch.enable()


#: What a worker's shutdown takes at most: its listener looks up once a second.
_SHUT_DOWN_SECONDS = 2.0


def _serve(connection: Connection) -> None:
    from .player import Player
    from .random_requests import play_at_random, play_store

    engine: Any = None
    is_left = False
    while True:
        if engine is None and is_left and not connection.poll(_SHUT_DOWN_SECONDS):
            # A NIXL agent polls until it is collected, and its shutdown held it when it stopped.
            gc.collect()
            is_left = False
        method, arguments = connection.recv()
        try:
            if method == "start":
                engine, result = Player(*arguments), None
            elif method == "play_store":
                result = play_store(*arguments)
            elif method == "play_at_random":
                result = play_at_random(*arguments)
            else:
                result = None if engine is None else attrgetter(method)(engine)(*arguments)
                if method == "stop":
                    engine, is_left = None, True
                    gc.collect()
            connection.send(result)
        except Exception as error:  # noqa: BLE001 - whatever the release raises is the answer
            traceback.print_exc()
            connection.send(_failure(method, error, engine.log.errors if engine else []))


def _failure(where: str, error: Exception, logged: list[str]) -> Failure:
    from .engine import LoadFailed

    frames = traceback.extract_tb(error.__traceback__)
    by_lab = str(Path(frames[-1].filename).parent) == _LAB
    is_refusal = isinstance(error, LoadFailed) or (where == "start" and not by_lab)
    message = "; logged: ".join([str(error), *dict.fromkeys(logged)])
    trace = "".join(traceback.format_exception(error))
    return Failure(where, type(error).__name__, message, trace, is_refusal)
