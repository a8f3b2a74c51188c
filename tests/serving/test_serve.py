"""How the harness starts a server: idle loops sleep, in every process. A stand-in is the server."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.serving

_SERVER = "vllm/entrypoints/openai/api_server.py"
# Prints, and lets a worker that is started as vLLM starts its own print, what waiting calls.
_STAND_IN = """
    import multiprocessing, os, sys

    def show(who):
        print(who, os.sched_yield.__module__, flush=True)

    if __name__ == "__main__":
        show("server " + " ".join(sys.argv[1:]))
        from vllm.entrypoints.openai.api_server import show as imported
        worker = multiprocessing.get_context("spawn").Process(target=imported, args=("worker",))
        worker.start()
        worker.join()
"""


@pytest.fixture
def path(tmp_path: Path) -> dict[str, str]:
    server = tmp_path / _SERVER
    server.parent.mkdir(parents=True)
    for package in list(server.parents)[:3]:
        (package / "__init__.py").touch()
    server.write_text(textwrap.dedent(_STAND_IN))
    checkout = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(checkout)))}


def _output(module: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", module, "--port", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:2]


def test_waits_sleep_in_the_server_and_its_workers(path: dict[str, str]) -> None:
    """A worker that spun on ``sched_yield`` would starve other engines on few cores."""
    sleeping = _output("kvpatch.verify.serve", path)
    assert sleeping == ["server --port 1 __main__", "worker __mp_main__"]
    plain = _output("vllm.entrypoints.openai.api_server", path)
    assert plain == ["server --port 1 posix", "worker posix"]
