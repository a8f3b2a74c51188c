"""Descriptions of several engines, by one process that imports vLLM once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


def described(commands: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The description of each command, or `refused` with a sentence."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.planning.describe_several"],
        input=json.dumps(commands), cwd=_ROOT, env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    descriptions: list[dict[str, Any]] = json.loads(found.stdout.splitlines()[-1])
    return descriptions
