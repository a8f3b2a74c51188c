"""PATCHES.md: written from the patches themselves and from the contract's outcome."""

from __future__ import annotations

import re
from pathlib import Path

from kvpatch._versions import GENERATIONS, Generation
from kvpatch.core.ledger import Patch
from kvpatch.patches import load

from .contract import Cell, cell

PATCHES_MD = Path(__file__).resolve().parents[2] / "PATCHES.md"

_HEAD = """\
# Patches

Written by `python -m tests.contract --write` from the patch files and from the
source of every release; CI fails when it is stale.

`x` applied, `-` not needed there, `!` refused.

"""


def patches_md() -> str:
    """The whole document."""
    patches = load()
    return _HEAD + _table(patches) + "".join(_section(p) for p in patches)


def _table(patches: tuple[Patch, ...]) -> str:
    rows = [
        "| generation | release | " + " | ".join(p.slug for p in patches) + " |",
        "|---|---|" + "---|" * len(patches),
    ]
    notes = []
    for generation in GENERATIONS:
        for release in generation.releases:
            marks = []
            for patch in patches:
                outcome = cell(patch, release, generation)
                marks.append(_mark(outcome))
                if outcome.outcome == "refused":
                    notes.append(f"- {patch.slug} on {release}: {outcome.reason}")
            rows.append(f"| {generation.slug} | {release} | {' | '.join(marks)} |")
    return "\n".join(rows + ([""] + notes if notes else [])) + "\n"


def _mark(outcome: Cell) -> str:
    return {"applied": "x", "not needed": "-", "refused": "!"}[outcome.outcome]


def _section(patch: Patch) -> str:
    title, _, body = patch.document.strip().partition("\n\n")
    text = re.sub(r"^(\w[\w ]*):\n", r"\n**\1.**\n", body, flags=re.MULTILINE)
    text = re.sub(r"^ {4}", "", text, flags=re.MULTILINE).replace("``", "`").strip()
    return f"\n## {patch.slug}\n\n{title}\n\n{text}\n\n{_facts(patch)}"


def _facts(patch: Patch) -> str:
    wire = "yes" if patch.wire_affecting else "no"
    lines = [f"Seen by a peer: {wire}. Wraps:", ""]
    by_sites: dict[tuple[str, ...], list[Generation]] = {}
    for generation in GENERATIONS:
        sites = patch.sites.get(generation.slug)
        if sites:
            by_sites.setdefault(tuple(map(str, sites)), []).append(generation)
    for sites, generations in by_sites.items():
        span = f"{generations[0].releases[0]} to {generations[-1].releases[-1]}"
        lines += [f"- {span}: `{site}`" for site in sites]
    reasons: dict[str, list[Generation]] = {}
    for generation in GENERATIONS:
        if generation.slug in patch.not_needed:
            reasons.setdefault(patch.not_needed[generation.slug], []).append(generation)
    for reason, generations in reasons.items():
        span = f"{generations[0].releases[0]} to {generations[-1].releases[-1]}"
        lines.append(f"- not needed on {span}: {reason}")
    return "\n".join(lines) + "\n"
