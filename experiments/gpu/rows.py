"""The options of all stages, and the file of their rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import harness

#: The label of a result's row: what a reader is told first.
LABEL = "what"


def options_of(description: str | None, **more: Any) -> argparse.Namespace:
    """Parses --device and --json, and what a stage adds: name and default of each."""
    return harness.options_of(
        description,
        judged=False,
        device=("cuda", "cpu or cuda"),
        json=(Path("rows.json"), "the rows go here"),
        **{name: (default, "of this stage") for name, default in more.items()},
    )


class Rows:
    """The rows of a stage; each is on disk at once, as the stage may end at any moment."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, list[Mapping[str, Any]]()

    def add(self, what: str, **more: Any) -> None:
        """Writes a row, and prints it."""
        self._rows.append({LABEL: what, **more})
        self._path.write_text(json.dumps(self._rows, indent=1, default=str))
        print(what, more, flush=True)
