"""Starting and stopping servers, and what a command line turns into; no vLLM needed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpatch.core.errors import BadOptions, EngineFailed
from kvpatch.tools import cli
from kvpatch.tools.verify import engine
from kvpatch.tools.verify.engine import (
    Engine,
    EngineSpec,
    Options,
    PatchedSides,
    build_setups,
    require_comparable,
    stop_all,
)
from kvpatch.tools.verify.run import Serving

from .commands import NEEDS_VLLM, ROOT, run

pytestmark = pytest.mark.serving

_SPEC = EngineSpec("fake", "model", (), connector=False, kvpatch=False)
# A server with a child of its own that ignores SIGTERM, as a worker that is stuck does.
_STUBBORN = """
    import signal, subprocess, sys, time
    if sys.argv[1:] == ["child"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("child is up", flush=True)
        time.sleep(600)
    subprocess.Popen([sys.executable, __file__, "child"])
    time.sleep(600)
"""


def _group_is_empty(group: int) -> bool:
    """Nobody but zombies, which have ended and wait for whoever inherits them."""
    found = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True)
    members = (line.split() for line in found.stdout.splitlines())
    return all(state.startswith("Z") for pgid, state in members if int(pgid) == group)


def _wait(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(_STUBBORN))
    monkeypatch.setattr(engine, "command", lambda spec, port: [sys.executable, str(script)])
    monkeypatch.setattr(engine, "_TERM_GRACE_S", 0.5)
    return Engine(_SPEC, tmp_path / "fake.log")


def test_stopping_ends_children_that_ignore_it(fake_engine: Engine) -> None:
    fake_engine.start()
    assert fake_engine._process is not None
    group = fake_engine._process.pid
    _wait(lambda: "child is up" in fake_engine.log.read_text())
    assert not _group_is_empty(group)
    stop_all([fake_engine])
    assert _group_is_empty(group)
    stop_all([fake_engine])  # harmless


_LOST_ITS_PORT = """
    import pathlib, sys, time
    once = pathlib.Path(sys.argv[1])
    if once.exists():
        raise SystemExit("second start")
    once.touch()
    print("zmq.error.ZMQError: Address already in use", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("script", "says"),
    [("raise SystemExit('no room')", "no room"), (_LOST_ITS_PORT, "second start")],
    ids=["ends", "has lost its port, and is started again"],
)
def test_a_server_that_ends_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "once")]
    monkeypatch.setattr(engine, "command", lambda spec, port: command)
    started = Engine(_SPEC, tmp_path / "fake.log")

    async def wait() -> None:
        async with httpx.AsyncClient() as client:
            await started.ready(client, 60.0)

    started.start()
    with pytest.raises(EngineFailed, match=f"ended with status 1(.|\n)*{says}"):
        asyncio.run(wait())
    started.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cleans_up_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio
            from kvpatch.core.errors import Interrupted
            from kvpatch.tools.verify.run import until_signal

            async def work():
                try:
                    print("working", flush=True)
                    await asyncio.sleep(600)
                finally:
                    print("cleaned up", flush=True)

            try:
                until_signal(work())
            except Interrupted as stopped:
                raise SystemExit(128 + stopped.number)
        """)
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert out == "cleaned up\n"
    assert process.returncode == 128 + number


def test_environment_of_a_stock_engine_never_has_kvpatch_on() -> None:
    inherited = {"ENABLE_KVPATCH": "true", "OMP_NUM_THREADS": "7", "HOME": "/home/me"}
    stock = engine.environment(_SPEC, inherited, 5000)
    on = engine.environment(EngineSpec("on", "model", (), True, True), {}, 5000)
    assert "ENABLE_KVPATCH" not in stock
    assert stock["OMP_NUM_THREADS"] == "7" and stock["HOME"] == "/home/me"
    assert on["ENABLE_KVPATCH"] == "true" and on["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5000"


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ("P", "", ["P", "P", "P", "P"]),
        ("P", "D", ["PD", "PD", "PD", "PD"]),
        ("PQ", "D", ["PD", "QD", "PD", "QD"]),
        ("PQ", "DE", ["PD", "QD", "PE", "QE"]),
    ],
)
def test_routes_reach_every_pair(prefill: str, decode: str, expected: list[str]) -> None:
    serving: Any = Serving("", prefill, decode, None, None, None)  # type: ignore[arg-type]
    routes = [serving._route(case) for case in range(4)]
    assert ["".join(filter(None, one)) for one in routes] == expected


def test_arguments_reach_the_engine_they_are_for(tmp_path: Path) -> None:
    options = Options(
        tmp_path,
        engine_args="--seed 1",
        p_args="--block-size 128",
        d_args="--tensor-parallel-size 2",
        kvpatch_on=PatchedSides.DECODE,
    )
    single, stock, patched = build_setups(options, "model")
    assert not single.decode and not single.prefill[0].connector
    assert all(spec.connector for setup in (stock, patched) for spec in setup.specs)
    assert [spec.kvpatch for spec in stock.specs] == [False, False]
    assert [spec.kvpatch for spec in patched.specs] == [False, True]
    assert "--tensor-parallel-size" not in (
        *single.prefill[0].arguments,
        *stock.prefill[0].arguments,
    )
    command = engine.command(stock.prefill[0], 80)
    assert command[-2:] == ["--block-size", "128"]  # behind the default, so that it counts
    assert "--seed" in command and "--kv-transfer-config" in command


def test_the_commands_options_reach_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    asked: list[Options] = []

    async def run(options: Options, console: object) -> None:
        asked.append(options)
        raise EngineFailed("no room")

    monkeypatch.setattr("kvpatch.tools.verify.run.verify", run)
    line = f"verify --work-dir {tmp_path} --kvpatch-on decode --no-negative-control --max-tokens 3"
    done = CliRunner().invoke(cli.app, [*line.split(), "--p-args", "--block-size 128"])
    assert done.exit_code == 2 and "error: no room" in done.output
    assert asked == [
        Options(
            tmp_path,
            p_args="--block-size 128",
            kvpatch_on=PatchedSides.DECODE,
            max_tokens=3,
            negative_control=False,
        )
    ]
    done = CliRunner().invoke(cli.app, ["verify", "--kvpatch-on", "left"])
    assert done.exit_code == 2 and "prefill" in done.output


@pytest.mark.parametrize("text", ["", "single", "single,sngle", "stock,stock"])
def test_set_ups_that_cannot_be_compared_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadOptions, match="two or more of single, stock, kvpatch"):
        require_comparable(Options(tmp_path, setups=text))


def test_other_bad_options_are_refused(tmp_path: Path) -> None:
    some = build_setups(Options(tmp_path, setups="kvpatch, single"), "model")
    assert [setup.name for setup in some] == ["single", "kvpatch"]
    with pytest.raises(BadOptions, match="cannot split"):
        build_setups(Options(tmp_path, p_args="--a 'b"), "model")


@NEEDS_VLLM
def test_a_release_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    command = "-m", "kvpatch.tools.cli", "verify", "--work-dir", str(tmp_path)
    done = run(*command, "--release", "0.1.0")
    assert done.returncode == 2
    assert "expected vLLM 0.1.0, found" in done.stderr
