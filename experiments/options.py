"""Takes and shows what scripts with engines share: names by commas, a folder, failures."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from kvpatch.core.errors import BadOptions


def chosen(text: str | None, names: Sequence[str], option: str) -> list[str]:
    """Returns the names of a list by commas, in the order of ``names``; all for None.

    Raises:
        BadOptions: there is none of a name.
    """
    asked = list(names) if text is None else [name.strip() for name in text.split(",")]
    if not set(asked) <= set(names):
        raise BadOptions(
            f"{option}: expected some of {', '.join(names)}, found {text!r}", "name some of these"
        )
    return [name for name in names if name in asked]


def work_folder(asked: Path | None, name: str, console: Console) -> Path:
    """The folder for logs and models, made and told; one of a run's own for None."""
    folder = (asked or Path(tempfile.mkdtemp(prefix=f"kvpatch-{name}-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"logs: {folder}", highlight=False)
    return folder


def show_said(where: str, said: Mapping[str, int], console: Console) -> None:
    """A line for each thing that failures said, and how often."""
    for text, times in sorted(said.items()):
        line = f"{where}: {times} x {text}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
