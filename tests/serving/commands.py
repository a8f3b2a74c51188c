"""Commands that start real engines, and what a test needs that runs one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"
)
#: The marks of tests that start engines.
ENGINES = [pytest.mark.serving, pytest.mark.engines, NEEDS_VLLM]


def run(
    *command: str, seconds: float = 900, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command of this checkout; in a Python of this environment where it begins with -m."""
    python = [sys.executable] if command[0] == "-m" else []
    return subprocess.run(
        [*python, *command],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
        env=None if variables is None else dict(variables),
        check=False,
    )


def succeed(*command: str, seconds: float = 900, variables: Mapping[str, str] | None = None) -> str:
    """The output of a command that must succeed."""
    done = run(*command, seconds=seconds, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
