"""Tables of the pages, from files of docs/data: between two marks, and nowhere else.

<!-- table: NAME -->
what is in docs/data/NAME.json
<!-- end of table -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "data"
README = ROOT / "README.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


@dataclass(frozen=True)
class Provenance:
    """Where a file's results come from.

    Attributes:
        release: of vLLM; empty where none was used.
        commit: of this repository: the one that was played, or the one that recorded the results.
    """

    made_by: str
    release: str
    date: str
    commit: str

    def __str__(self) -> str:
        release = f", vLLM {self.release}" if self.release else ""
        return f"Made by `{self.made_by}`{release}; {self.date}, commit {self.commit}."


def pages() -> list[Path]:
    """Every page that a reader sees."""
    return [README, *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(page: Path) -> str:
    """The page's text, each of its tables made anew."""
    return filled(page.read_text(), has_source=page != README)


def filled(text: str, has_source: bool = True) -> str:
    """The text, each of its tables made anew, with a line that says where it is from."""
    return _TABLE.sub(partial(_filled, has_source=has_source), text)


def names_of(text: str) -> list[str]:
    """The files whose tables a text has."""
    return [found[2] for found in _TABLE.finditer(text)]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, a line for each row."""
    return _lines([columns, ["---"] * len(columns), *rows])


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


def remade(page: Path, *parts: tuple[str, str]) -> str:
    """The page's text with some of its parts made anew; the prose around them is its own.

    Args:
        parts: a pattern whose group stays, and what stands behind that group.

    Raises:
        LookupError: the page has no such part, or several.
    """
    text = page.read_text()
    for pattern, new in parts:
        text, count = re.subn(pattern, lambda found, new=new: found[1] + new, text)
        if count != 1:
            raise LookupError(f"{page.name}: expected one place of {pattern!r}, found {count}")
    return text


def rows_below(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[str, str]:
    """A part of a page: the rows of the table that has these columns."""
    head = re.escape(f"| {' | '.join(columns)} |\n")
    return rf"({head}\|[-| ]+\|\n)(?:\|.*\n)*", _lines(rows)


def _filled(found: re.Match[str], has_source: bool) -> str:
    data = json.loads((DATA / f"{found[2]}.json").read_text())
    text = markdown(data["columns"], data["rows"])
    if has_source:
        source = Provenance(data["made_by"], data["release"], data["date"], data["commit"])
        note = f"{data['note']} " if data["note"] else ""
        text += f"\n{note}*{source}*\n\n"
    return f"{found[1]}\n{text}\n{found[3]}" if not has_source else f"{found[1]}\n{text}{found[3]}"
