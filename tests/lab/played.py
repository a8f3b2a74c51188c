"""When results were played, and at which commit: what tells their age is kept beside them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Played:
    """The day, and the commit that was checked out; a + behind it where files were changed."""

    date: str
    commit: str


def now() -> Played:
    """Of what is played here and now."""
    changed = "+" if _git("status", "--porcelain", "--untracked-files=no", "--", "kvpatch") else ""
    commit = _git("rev-parse", "--short", "HEAD")
    return Played(datetime.now(timezone.utc).date().isoformat(), commit + changed)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=_ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
