"""Lets engines import what this checkout has and the wheel has not."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def importable_in_engines(*folders: Path) -> None:
    """Puts the checkout first on ``PYTHONPATH``, which every engine inherits; then the folders."""
    paths = (str(ROOT), *map(str, folders), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
