"""PATCHES.md: written from the patches themselves and from the contract's outcome."""

from __future__ import annotations

import re
from pathlib import Path

from kvpatch.core.ledger import Patch
from kvpatch.core.releases import FACTS
from kvpatch.patches import load

from .contract import Cell, cell

PATCHES_MD = Path(__file__).resolve().parents[2] / "PATCHES.md"

_HEAD = """\
# Patches

Written by `python -m tests.contract --write` from the patch files and from the
source of every release; CI fails when it is stale.

"""
_MARKS = """
## Release by release

`x` applied, `-` not needed there, `!` refused.

"""


def patches_md() -> str:
    """The whole document."""
    patches = load()
    sections = "".join(map(_section, patches))
    return _HEAD + _summary(patches) + _MARKS + _table(patches) + sections


def _summary(patches: tuple[Patch, ...]) -> str:
    """What each mends, in a line, and where it is needed."""
    rows = ["| patch | what it does | releases |", "|---|---|---|"]
    for patch in patches:
        needed = [release for release, facts in FACTS.items() if patch.sites(facts)]
        title = _title(patch).rstrip(".").replace("``", "`")
        rows.append(f"| [{patch.slug}](#{patch.slug}) | {title} | {needed[0]} to {needed[-1]} |")
    return "\n".join(rows) + "\n"


def _table(patches: tuple[Patch, ...]) -> str:
    rows = [
        "| generation | release | " + " | ".join(p.slug for p in patches) + " |",
        "|---|---|" + "---|" * len(patches),
    ]
    notes = []
    for release, facts in FACTS.items():
        marks = []
        for patch in patches:
            outcome = cell(patch, release, facts)
            marks.append(_mark(outcome))
            if outcome.outcome == "refused":
                notes.append(f"- {patch.slug} on {release}: {outcome.reason}")
        rows.append(f"| {facts.generation} | {release} | {' | '.join(marks)} |")
    return "\n".join(rows + ([""] + notes if notes else [])) + "\n"


def _mark(outcome: Cell) -> str:
    return {"applied": "x", "not needed": "-", "refused": "!"}[outcome.outcome]


def _section(patch: Patch) -> str:
    title, body = _title(patch), patch.document.strip().partition("\n\n")[2]
    text = re.sub(r"^(\w[\w ]*):\n", r"\n**\1.**\n", body, flags=re.MULTILINE)
    text = re.sub(r"^ {4}", "", text, flags=re.MULTILINE).replace("``", "`").strip()
    return f"\n## {patch.slug}\n\n{title}\n\n{text}\n\n{_facts(patch)}"


def _title(patch: Patch) -> str:
    """The first line of its document."""
    return patch.document.strip().partition("\n\n")[0]


def _facts(patch: Patch) -> str:
    wire = "yes" if patch.wire_affecting else "no"
    lines = [f"Seen by a peer: {wire}. Wraps:", ""]
    by_sites: dict[tuple[str, ...], list[str]] = {}
    for release, facts in FACTS.items():
        by_sites.setdefault(tuple(map(str, patch.sites(facts))), []).append(release)
    without = by_sites.pop((), [])
    for sites, releases in by_sites.items():
        lines += [f"- {releases[0]} to {releases[-1]}: `{site}`" for site in sites]
    if without:
        lines.append(f"- not needed on {without[0]} to {without[-1]}: {patch.not_needed}")
    return "\n".join(lines) + "\n"
