"""When results were played, and at which commit: what tells their age is kept beside them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


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


def write_table(
    path: Path,
    made_by: str,
    release: str,
    note: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> None:
    """Writes a table of docs/data, played here and now; one line a row, so that a change shows.

    Args:
        release: of vLLM; empty where none was used.
    """
    head = {
        "made_by": made_by,
        "release": release,
        **vars(now()),
        "note": note,
        "columns": list(columns),
    }
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    path.write_text(f'{text},\n "rows": [\n{lines}\n ]\n}}\n')


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=_ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
