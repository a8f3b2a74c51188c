"""The engines of a run: what it is asked for, and each server as a process with all it starts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from packaging.version import Version

from kvpatch.core.errors import BadOptions, EngineFailed
from kvpatch.core.installed import installed_vllm

if TYPE_CHECKING:
    import httpx

HOST = "127.0.0.1"
_POLL_S = 0.5
_TERM_GRACE_S = 10.0
_KILL_GRACE_S = 5.0
_LOG_TAIL_LINES = 30
_RPC_TIMEOUT_S = 120.0

_SIDE_CHANNEL_PORTS = 8
"""A worker listens at the side channel's port plus its rank, so a run of ports must be free."""

_PORTS = (15_000, 32_000)
_PORT_TAKEN = "Address already in use"

TRANSFER_CONFIG = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    # Seconds that a prefilled prompt waits for its reader; a busy machine needs more than 30.
    "kv_connector_extra_config": {"kv_lease_duration": 300},
}

_SMALL_CPU_ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Lets several engines share two cores; a variable that is set already keeps its value."""

# A process group, so that all of an engine can be stopped, and not a session: Linux shares out
# cores by session first (autogroups), and 6.18 was seen to run one engine's spinning threads for
# 140 s while every other session's threads, NIXL's among them, got no slice.
_OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
)


@dataclass(frozen=True)
class EngineSpec:
    """How one server is started.

    Attributes:
        name: for tables and log files, e.g. ``stock-prefill``.
        arguments: of the API server, later ones override earlier ones.
        environment: variables on top of the inherited ones.
        python: of the environment whose vLLM it is; empty for the one that this runs in.
    """

    name: str
    model: str
    arguments: tuple[str, ...]
    connector: bool
    kvpatch: bool
    environment: tuple[tuple[str, str], ...] = ()
    python: str = ""


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive ports that are free now.

    Below the range that systems hand out themselves, from which any outgoing connection could take
    one before the server, which needs half a minute to get to it, listens there.
    """
    for _ in range(100):
        first = random.randrange(*_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            for port in range(first, first + count):
                opened.enter_context(socket.socket()).bind((HOST, port))
            return first
    raise EngineFailed(f"found no {count} consecutive free ports on {HOST}")


def command(spec: EngineSpec, port: int) -> list[str]:
    connector = ("--kv-transfer-config", json.dumps(TRANSFER_CONFIG)) if spec.connector else ()
    return [
        *(spec.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", spec.model, "--served-model-name", spec.model),
        *("--host", HOST, "--port", str(port)),
        *("--worker-extension-cls", "kvpatch.tools.verify.probe.CacheProbe"),
        *(*connector, *spec.arguments),  # last, so that they override
    ]


def environment(
    spec: EngineSpec, inherited: Mapping[str, str], side_channel_port: int
) -> dict[str, str]:
    """The server's environment: ``inherited`` with what the spec says on top."""
    result = {**_SMALL_CPU_ENGINE, **inherited}
    result.pop("ENABLE_KVPATCH", None)
    result |= {
        "VLLM_SERVER_DEV_MODE": "1",  # serves /collective_rpc, which the probe answers
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(spec.model).is_dir():
        result["HF_HUB_OFFLINE"] = "1"
    if spec.kvpatch:
        result["ENABLE_KVPATCH"] = "true"
    return result | dict(spec.environment)


def require_environment() -> None:
    """Fail early, with what to do, where the servers could not even start.

    Raises:
        EngineFailed: vLLM is missing, or kvpatch is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineFailed(
            "vLLM is not installed here: run experiments/equivalence.sh, which makes an environment"
        )
    if not metadata.entry_points(group="vllm.general_plugins", name="kvpatch"):
        raise EngineFailed(
            "kvpatch is not installed here, so vLLM does not find its plugin: pip install it"
        )


@dataclass
class Engine:
    """A running server. :meth:`stop` must be called, whatever happened."""

    spec: EngineSpec
    log: Path
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def group(self) -> int | None:
        """The number of its process group; None while it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        self.port = free_ports(1)
        side_channel = free_ports(_SIDE_CHANNEL_PORTS)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command(self.spec, self.port),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.log.parent,
                env=environment(self.spec, os.environ, side_channel),
                **_OWN_GROUP,
            )

    async def ready(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        """Wait until the server answers ``/health``.

        Raises:
            EngineFailed: it exited or took longer, with the end of its log.
        """
        import httpx

        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.log.exists() and _PORT_TAKEN in self.log.read_text(errors="replace"):
                # Its listener ended and the server hangs: another process was faster.
                self.stop()
                self.start()
            self.require_alive()
            try:
                response = await client.get(f"{self.url}/health", timeout=5.0)
                if response.status_code == 200:
                    self._spread_over_cores()
                    return
            except httpx.TransportError:
                pass  # not listening yet
            await asyncio.sleep(_POLL_S)
        raise EngineFailed(
            f"{self.spec.name} was not ready after {timeout_s:.0f} s; {self._log_tail()}"
        )

    def _spread_over_cores(self) -> None:
        """Undo the pinning of the connector's workers to the last core.

        vLLM's CPU backend does that from 0.17 on. Two engines on one machine would share that core
        while the others idle, and a transfer would take seconds.
        """
        if self._process is None or not hasattr(os, "sched_setaffinity"):
            return
        cores = os.sched_getaffinity(0)
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # processes and threads end while they are listed
                # "pid (name) state ppid pgrp ..."; the name may hold spaces and parentheses
                if int(status.read_text().rpartition(")")[2].split()[2]) == self._process.pid:
                    for thread in (status.parent / "task").iterdir():
                        os.sched_setaffinity(int(thread.name), cores)

    def require_alive(self) -> None:
        """Raise :class:`EngineFailed` if the process has ended."""
        status = self._process.poll() if self._process else None
        if self._process is None or status is not None:
            raise EngineFailed(f"{self.spec.name} ended with status {status}; {self._log_tail()}")

    async def rpc(self, client: httpx.AsyncClient, method: str, *arguments: str) -> list[Any]:
        """Call a method of the probe on every rank; one result per rank.

        Raises:
            EngineFailed: the engine has ended, or is about to, or the method raised.
        """
        import httpx

        asked = {"method": method, "args": list(arguments)}
        try:
            response = await client.post(
                f"{self.url}/collective_rpc", json=asked, timeout=_RPC_TIMEOUT_S
            )
        except httpx.TransportError as error:
            self.require_alive()
            raise EngineFailed(
                f"{self.spec.name} answers nothing ({error!r}); {self._log_tail()}"
            ) from error
        if response.status_code != 200:
            raise EngineFailed(
                f"{self.url}: {method} failed with HTTP {response.status_code}: "
                f"{response.text[:500]} (vLLM < 0.10.2 has no /collective_rpc)"
            )
        results: list[Any] = response.json()["results"]
        return results

    def stop(self) -> None:
        """End the process and everything in its group. Blocks, so that nothing can interrupt it."""
        if self._process is None:
            return
        if not _end_group(self._process, signal.SIGTERM, _TERM_GRACE_S):
            _end_group(self._process, signal.SIGKILL, _KILL_GRACE_S)
        self._process.wait()
        self._process = None

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"the end of {self.log}:", *lines[-_LOG_TAIL_LINES:]])


def stop_all(engines: Sequence[Engine]) -> None:
    """Stop every engine; all are asked first, so that they end side by side."""
    for engine in engines:
        if engine._process is not None:
            _signal_group(engine._process, signal.SIGTERM)
    for engine in engines:
        engine.stop()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Signals a process group; True if it still had a member."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _end_group(process: subprocess.Popen[bytes], number: int, grace_s: float) -> bool:
    """Signals a process group, and waits; True if it is empty then."""
    deadline = time.monotonic() + grace_s
    alive = _signal_group(process, number)
    while alive and time.monotonic() < deadline:
        process.poll()  # reaps the leader, which would stay a member of the group otherwise
        alive = _signal_group(process, 0)
        time.sleep(0.1)
    return not alive


# --- the set-ups of a run -----------------------------------------------------------------

SETUPS = ("single", "stock", "kvpatch")
"""All set-ups, in the order in which they run; the first that is asked for is the reference."""


class PatchedSides(str, Enum):
    """The sides of a pair on which kvpatch is."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


def _new_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"kvpatch-verify-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Options:
    """The options of ``kvpatch verify``; ``*_args`` are of vLLM's API server."""

    work_dir: Annotated[
        Path,
        typer.Option(
            default_factory=_new_folder,
            show_default=False,
            resolve_path=True,
            help="For logs, model and results; kept.",
        ),
    ]
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda: compare two workers' caches there, without any engine."),
    ] = None
    release: Annotated[str | None, typer.Option(help="vLLM release that must be installed.")] = None
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name; by default a tiny random Llama.")
    ] = None
    setups: Annotated[str, typer.Option(help="Which to run; the first is the reference.")] = (
        ",".join(SETUPS)
    )
    engine_args: Annotated[
        str, typer.Option(help="Server arguments of every engine, quoted as one.")
    ] = ""
    p_args: Annotated[str, typer.Option(help="Server arguments of the prefill engine.")] = ""
    d_args: Annotated[str, typer.Option(help="Server arguments of the decode engine.")] = ""
    kvpatch_on: Annotated[PatchedSides, typer.Option(help="Sides with kvpatch.")] = (
        PatchedSides.BOTH
    )
    dtype: Annotated[str, typer.Option(help="Data type of model and cache.")] = "float32"
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24
    negative_control: Annotated[
        bool, typer.Option(help="Also spoil a block on purpose; the comparison must notice.")
    ] = True
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds that an engine may take to start.")
    ] = 600.0


@dataclass(frozen=True)
class Setup:
    """A single engine (no decode engine), or prefill engines and decode engines."""

    name: str
    prefill: tuple[EngineSpec, ...]
    decode: tuple[EngineSpec, ...] = ()

    @property
    def specs(self) -> tuple[EngineSpec, ...]:
        return (*self.prefill, *self.decode)


def require_release(expected: str | None) -> None:
    """Raise :class:`BadOptions` unless vLLM ``expected`` is what is installed here."""
    found = installed_vllm() if expected is not None else None
    if found is not None and Version(found.version).public != expected:
        raise BadOptions(
            f"--release: expected vLLM {expected}, found {found.distribution} {found.version} in "
            "this environment",
            "run it in one with that release, which experiments/equivalence.sh makes",
        )


def require_comparable(options: Options) -> None:
    """Raises :class:`BadOptions` for an unknown set-up, or for one alone."""
    asked = _names(options)
    if not asked <= set(SETUPS) or len(asked) < 2:
        reason = f"--setups is {options.setups!r}"
        raise BadOptions(reason, f"give two or more of {', '.join(SETUPS)}")


def _names(options: Options) -> set[str]:
    return {name.strip() for name in options.setups.split(",") if name.strip()}


def build_setups(options: Options, model: str) -> list[Setup]:
    """Returns the set-ups that are asked for, in the order of :data:`SETUPS`."""
    of_all, *of_sides = map(_split, (options.engine_args, options.p_args, options.d_args))

    def engine(name: str, arguments: tuple[str, ...], connector: bool, on: bool) -> EngineSpec:
        arguments = (*of_all, *arguments)
        return small_engine(name, model, options.dtype, arguments, connector, on)

    found = []
    for name in (name for name in SETUPS if name in _names(options)):
        if name == "single":
            found.append(Setup(name, (engine(name, (), False, False),)))
            continue
        prefill, decode = (
            engine(
                f"{name}-{side.value}",
                arguments,
                True,
                name == "kvpatch" and options.kvpatch_on in (PatchedSides.BOTH, side),
            )
            for side, arguments in zip(
                (PatchedSides.PREFILL, PatchedSides.DECODE), of_sides, strict=True
            )
        )
        found.append(Setup(name, (prefill,), (decode,)))
    return found


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadOptions(
            f"cannot split {text!r} into arguments: {error}", "write it as arguments of a shell"
        ) from None


def small_engine(
    name: str,
    model: str,
    dtype: str,
    arguments: tuple[str, ...],
    connector: bool,
    kvpatch: bool,
    environment: tuple[tuple[str, str], ...] = (),
) -> EngineSpec:
    """An engine that several of can share a small machine; ``arguments`` override its own."""
    small = (
        *("--dtype", dtype, "--block-size", "32", "--max-model-len", "1024"),
        *("--max-num-seqs", "8", "--enforce-eager"),
    )
    return EngineSpec(name, model, (*small, *arguments), connector, kvpatch, environment)
