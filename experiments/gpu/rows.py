"""The options of all stages, and the file of their rows.

experiments/harness.py imports rich, which a GPU machine may lack: the first stages do without it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The label of a result's row: what a reader is told first.
LABEL = "what"


def options_of(description: str | None, **more: Any) -> argparse.Namespace:
    """Parses --device and --json, and what a stage adds: name and default of each."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path, required=True, help="the rows go here")
    for name, default in more.items():
        parser.add_argument(f"--{name}", default=default, type=type(default))
    return parser.parse_args()


class Rows:
    """The rows of a stage; each is on disk at once, as the stage may end at any moment."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, list[Mapping[str, Any]]()

    def add(self, what: str, **more: Any) -> None:
        """Writes a row, and prints it."""
        self._rows.append({LABEL: what, **more})
        self._path.write_text(json.dumps(self._rows, indent=1, default=str))
        print(what, more, flush=True)
