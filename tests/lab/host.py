"""``Lab``: the side of the lab that tests hold."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from tests.releases import cache, kvcached

from . import far_memory
from .ancestor import LOG, Ancestor
from .case import Case, EngineSpec, Report
from .engine_api import MODELS, Ask, Checked, Failure, Fork, Prompt, Start
from .releases import declaring
from .side_channel import is_listening

_REPOSITORY = Path(__file__).resolve().parents[2]
#: Of a release's import, which takes half a minute of a processor: labs may share two of them.
_IMPORT_SECONDS = 600.0
_CALL_SECONDS = 60.0
_TRANSFER_SECONDS = 30.0
_NOTIFICATION_SECONDS = 10.0
_SETTLE_SECONDS = 0.02
_TAIL_CHARACTERS = 3000
#: How faulthandler begins; the stacks of all threads behind it are longer than a tail.
_FATAL = "Fatal Python error"
#: What kvpatch on D says of a request whose parameters it does not take.
_COMPUTED = "is taken without its parameters, and computed here"
_DUMP_SECONDS = 0.5
#: Engine processes that wait for a case, the last ones used: each takes some 70 MB.
_MOST_IDLE = 24
#: NIXL makes a UCX worker for each thread beside one of its own, which takes as long as all else
#: of an engine's start. The real engines of ``tests/serving`` have vLLM's four.
EXTRA = {"num_threads": 0}


#: What is decided when a process is forked: whether kvpatch is on, its patches, variables.
Kind = tuple[bool, tuple[str, ...], tuple[tuple[str, str], ...]]


class Crashed(RuntimeError):
    """An engine process died or hung; the message ends with what its stderr says of it."""


class Engine:
    """An engine process, seen from the tests."""

    def __init__(self, connection: Connection, pid: int, log: Path, kind: Kind) -> None:
        self._connection, self.pid, self._log = connection, pid, log
        self.kind = kind
        self._written = 0
        #: The test that it has served, as long as it is idle.
        self.last_test = ""

    def has_died(self) -> bool:
        """Whether an idle process has ended: it sends nothing but the end of its stream."""
        return self._connection.poll(0)

    def send(self, method: str, *arguments: Any) -> None:
        written = self._log.stat().st_size if self._log.exists() else 0
        try:
            self._connection.send((method, arguments))
        except OSError as error:  # it says why behind the call before
            raise Crashed(f"before {method}: {error!r}\n{self.tail()}") from error
        self._written = written

    def receive(self, method: str) -> Any:
        if not self._connection.poll(_CALL_SECONDS):
            self._dump_stacks()
            raise Crashed(f"{method}: no answer within {_CALL_SECONDS:g} s\n{self.tail()}")
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise Crashed(f"{method}: the process died\n{self.tail()}") from error

    def call(self, method: str, *arguments: Any) -> Any:
        self.send(method, *arguments)
        return self.receive(method)

    def _dump_stacks(self) -> None:
        """Has a hung process write where each of its threads is, for :meth:`tail`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(_DUMP_SECONDS)

    def tail(self) -> str:
        """What it wrote since the last call, at its end or around what killed it."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        text = text[self._written :]
        fatal = text.find(_FATAL)
        if fatal < 0:
            return text[-_TAIL_CHARACTERS:]
        return text[max(0, fatal - _TAIL_CHARACTERS // 2) :][:_TAIL_CHARACTERS]

    def kill(self) -> None:
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


#: Of all labs of this process.
ANCESTOR = Ancestor()


class Lab:
    """All cases of one release; engine processes are forked once and serve many.

    ::

        with Lab("0.32.0") as lab:
            report = lab.run(case)

    Args:
        models: the folder of the engines' models, whose paths handshakes compare; None for one of
            this lab's own.
    """

    def __init__(self, release: str, models: Path | None = None) -> None:
        self.release = release
        self._models = models
        self._hired: list[Engine] = []
        self._idle: list[Engine] = []
        self._folder = tempfile.TemporaryDirectory(prefix=f"kvpatch-lab-{release}-")
        self._number = 0

    def __enter__(self) -> Lab:
        tree = cache.tree(self.release)
        if not cache.is_fetched(self.release):
            raise FileNotFoundError(f"no tree of vLLM {self.release} at {tree}: fetch it first")
        self._control, theirs = socket.socketpair()
        folder = Path(self._folder.name)
        variables = environment(tree, folder, self._models)
        self._process = ANCESTOR.fork(variables, folder, theirs.fileno())
        theirs.close()
        self._control.settimeout(_IMPORT_SECONDS)
        try:
            ready = self._control.recv(64)
        except TimeoutError:
            ready = b""
        if ready != b"ready\n":
            tail = (folder / LOG).read_text(errors="replace")[-_TAIL_CHARACTERS:]
            self.close()
            raise Crashed(f"vLLM {self.release} cannot be imported\n{tail}")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for engine in (*self._hired, *self._idle):
            engine.kill()
        self._hired, self._idle = [], []
        self._control.close()
        self._process.end()
        self._folder.cleanup()

    def run(
        self,
        case: Case,
        *,
        declares: bool = True,
        of_prefill: Lab | None = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> Report:
        """Plays `case`. What is identical is then spoilt on D, in each way, to see it noticed.

        Args:
            declares: whether a D that has to be told what a stock P's handshake does not say is
                told by its operator.
            of_prefill: P's, where P is of another release.
            extra: of the connector's own configuration, on both sides.
        """
        started = time.perf_counter()
        if declares:
            case = declaring(case, self.release)
        of_prefill = of_prefill or self
        prefill, decode = of_prefill.hire(case.prefill), self.hire(case.decode)
        ports = PORTS.take(case.prefill.tp_size), PORTS.take(case.decode.tp_size)
        try:
            report = self._play(case, prefill, decode, ports, extra)
            if of_prefill is not self:
                listens = is_listening(of_prefill.release, ports[0])
                report = replace(report, listens=listens)
            # D first: UCX ends a process that connects to one whose agent has just gone.
            self.dismiss(decode)
            of_prefill.dismiss(prefill)
        except Crashed as error:
            of_prefill.discard(prefill)
            self.discard(decode)
            report = Report("failed", str(error))
        if report.detail:  # pytest cuts a report short, and shows this whole
            print(report.detail)
        return replace(report, seconds=time.perf_counter() - started)

    def on_d(self, case: Case, *, declares: bool = True) -> Report:
        """Plays a case with kvpatch on D alone, all of it."""
        return self.run(case.patched(prefill=False), declares=declares)

    def hire(self, spec: EngineSpec) -> Engine:
        """A process for an engine of `spec`, in which none is running."""
        kind = (spec.patched, spec.patches, spec.settings)
        # Their engines were shut down by then, and no test's result depends on them. A thread of
        # NIXL's that ends behind a shutdown can still end the process.
        for dead in [engine for engine in self._idle if engine.has_died()]:
            warnings.warn(
                f"an engine process died behind {dead.last_test}\n{dead.tail()}", stacklevel=2
            )
            self.discard(dead)
        found = next((engine for engine in self._idle if engine.kind == kind), None)
        if found is None:
            found = self._fork(kind)
        else:
            self._idle.remove(found)
        self._hired.append(found)
        return found

    def dismiss(self, *engines: Engine) -> None:
        """Shuts the engines in these processes down, which can then be hired again."""
        for engine in engines:
            engine.send("stop")
        for engine in engines:
            engine.receive("stop")
        for engine in engines:
            self._hired.remove(engine)
            self._idle.append(engine)
            engine.last_test = os.environ.get("PYTEST_CURRENT_TEST", "")
        while len(self._idle) > _MOST_IDLE:
            self._idle.pop(0).kill()

    def discard(self, engine: Engine) -> None:
        """Kills a process; one that was dismissed already may go too."""
        for engines in (self._hired, self._idle):
            if engine in engines:
                engines.remove(engine)
        engine.kill()

    def _play(
        self,
        case: Case,
        prefill: Engine,
        decode: Engine,
        ports: tuple[int, int],
        extra: Mapping[str, Any],
    ) -> Report:
        self._number += 1
        run = f"{self._number}-{uuid.uuid4().hex[:6]}"
        sides = (("prefill", prefill, case.prefill), ("decode", decode, case.decode))
        for index, (name, engine, spec) in enumerate(sides):
            seed = 2 * self._number + index
            start = Start(spec, f"{name}-{run}", ports[index], seed, {**EXTRA, **extra})
            engine.send("start", start)
        for answer in [engine.receive("start") for _, engine, _ in sides]:
            if isinstance(answer, Failure):
                return _without_answer("registration", answer)

        sizes = [(case.prompt_tokens, case.prefix_hit_tokens)] * case.n_requests
        if case.tokens_before:
            sizes.insert(0, (case.tokens_before, 0))
        prompts = [Prompt(f"req-{run}-{n}", n, tokens) for n, (tokens, _) in enumerate(sizes)]
        answers = prefill.call("compute", prompts)
        if isinstance(answers, Failure):
            return _without_answer("prefill", answers)
        asks = [Ask(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        hits = [hit for _, hit in sizes]
        moved = decode.call("decode", list(zip(asks, hits, strict=True)), _TRANSFER_SECONDS)
        if isinstance(moved, Failure):
            return _without_answer("transfer", moved)
        computed = [error for error in decode.call("logged") if _COMPUTED in error]
        if computed:  # P keeps its blocks until their time is over
            return Report("refused", computed[0])
        found = decode.call("check", True)
        # What is wrong is that, whether P hears that it was read or not.
        is_wrong = isinstance(found, Checked) and found.wrong
        untold = set() if is_wrong else self._untold(prefill, decode, asks)
        held = prefill.call("check", False)
        for answer in (held, found):
            if isinstance(answer, Failure):
                return _without_answer("comparison", answer)
        report = Report(
            "identical" if not found.wrong and not found.stray else "corrupt",
            wrong_elements=found.wrong,
            total_elements=found.total,
            moved_tokens=moved,
            stray_bytes=found.stray,
            descriptors=found.descriptors,
            registrations=found.registrations,
            prepared=found.prepared,
            noticed=found.noticed,
        )
        missed = [name for name, wrong in found.noticed.items() if not wrong]
        if missed:
            return replace(report, outcome="failed", detail=f"went unnoticed: {missed}")
        if held.wrong:
            return replace(report, outcome="failed", detail="P's own cache has changed")
        if untold:
            detail = f"P was not told that {len(untold)} requests were read"
            return replace(report, outcome="failed", detail=detail)
        return report

    def _untold(self, prefill: Engine, decode: Engine, asks: Sequence[Ask]) -> set[str]:
        """The requests whose blocks P keeps though they were read."""
        kept = {ask.prompt.name for ask in asks if '"remote_block_ids": []' not in ask.answer}
        end = time.monotonic() + _NOTIFICATION_SECONDS
        while kept and time.monotonic() < end:
            kept -= prefill.call("heard", _SETTLE_SECONDS, sorted(kept))
            if kept:
                # A full local hit is only a notification, sent some step after the
                # handshake: D must go on stepping too.
                decode.call("settle", _SETTLE_SECONDS)
        return kept

    def _fork(self, kind: Kind) -> Engine:
        log = Path(self._folder.name) / f"engine-{uuid.uuid4().hex[:6]}.log"
        ours, theirs = socket.socketpair()
        request = pickle.dumps(Fork(str(log), *kind))
        socket.send_fds(self._control, [request], [theirs.fileno()])
        theirs.close()
        pid = int(self._control.recv(64))
        return Engine(Connection(ours.detach()), pid, log, kind)


def _without_answer(phase: str, failure: Failure) -> Report:
    detail = f"{phase}: {failure.kind}: {failure.message}"
    if failure.is_refusal:
        return Report("refused", detail)
    return Report("failed", f"{detail}\n{failure.trace[-_TAIL_CHARACTERS:]}")


def environment(tree: Path, home: Path, models: Path | None = None) -> dict[str, str]:
    """What the release sees: its own tree first, no network, no stray settings."""
    keep = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("VLLM_", "KVPATCH_", "ENABLE_KVPATCH"))
    }
    return keep | {
        "PYTHONPATH": os.pathsep.join([str(tree), str(_REPOSITORY)]),
        "HOME": str(home),
        MODELS: str(models or home / "models"),
        kvcached.PLACE: str(kvcached.tree(kvcached.NEWEST)),
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # random requests: sets of names have one order
        **far_memory.variables(),
        "UCX_NET_DEVICES": "lo",
    }


class Ports:
    """Hands out ports for the engines' handshakes, none twice before all were.

    Below the ports that the system hands out to connections by itself, and in a
    range that no other process of this machine's labs has: nobody else may
    take one between the look here and the engine's own bind. Two engines that
    start together look before either has bound, hence the turn: chosen at random,
    one port in some thousand cases went to both, and the second waited for ever.
    """

    _LOWEST, _COUNT, _RANGES = 10000, 1000, 20

    def __init__(self) -> None:
        self._next = random.randrange(self._COUNT)
        self._range: TextIO | None = None
        self._lowest = 0

    def _claim(self) -> None:
        """Takes a range for as long as this process runs.

        Raises:
            OSError: all are taken.
        """
        folder = Path(tempfile.gettempdir(), f"kvpatch-lab-ports-{os.getuid()}")
        folder.mkdir(exist_ok=True)
        for number in range(self._RANGES):
            held = (folder / str(number)).open("w")
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.close()
                continue
            self._range, self._lowest = held, self._LOWEST + number * self._COUNT
            return
        raise OSError(f"{self._RANGES} labs have all ports from {self._LOWEST} on")

    def take(self, count: int) -> int:
        """The first of `count` free neighbouring ports.

        Raises:
            OSError: there are none.
        """
        if self._range is None:
            self._claim()
        for _ in range(self._COUNT // count):
            if self._next + count > self._COUNT:
                self._next = 0
            first = self._lowest + self._next
            self._next += count
            if all(_is_free(port) for port in range(first, first + count)):
                return first
        raise OSError(f"no {count} free ports from {self._lowest} on")


PORTS = Ports()


def _is_free(port: int) -> bool:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
