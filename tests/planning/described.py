"""Descriptions of several engines, by one process that imports vLLM once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpatch.core.errors import Mistake
from kvpatch.tools.planning.describe import describe

_ROOT = Path(__file__).parents[2]


def described(commands: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The description of each command, or `refused` with a sentence."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.planning.described"],
        input=json.dumps(commands), cwd=_ROOT, env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    descriptions: list[dict[str, Any]] = json.loads(found.stdout.splitlines()[-1])
    return descriptions


def main() -> None:
    """Prints the descriptions of the commands on stdin; of what is refused, the sentence."""
    found, environment = [], dict(os.environ)
    for command in json.load(sys.stdin):
        try:
            found.append(describe(**command))
        except Mistake as error:
            found.append({"refused": str(error)})
        os.environ.clear()  # vLLM sets variables of its own
        os.environ.update(environment)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
