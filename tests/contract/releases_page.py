"""docs/reference/releases.md: every supported release, by the patches and by the lab's results."""

from __future__ import annotations

from collections import Counter

from kvpatch.core.releases import FACTS, RELEASES, ReleaseFacts
from kvpatch.patches import load
from tests.lab import table
from tests.lab.releases import states_block_size, states_kernel_blocks, states_layout

from . import facts_table
from .tables import ROOT, remade, rows_below

PAGE = ROOT / "docs" / "reference" / "releases.md"


def page() -> str:
    """The whole document."""
    columns = ("vLLM", "generation", "handshake leaves open", "not needed", "stock", "kvpatch on D")
    return remade(
        PAGE,
        (
            r"()\d+ releases, \S+ to [^,]+",
            f"{len(RELEASES)} releases, {RELEASES[0]} to {RELEASES[-1]}",
        ),
        rows_below(columns, [_row(facts) for facts in FACTS.values()]),
        *facts_table.parts(),
    )


def _row(facts: ReleaseFacts) -> tuple[str, ...]:
    release = facts.release
    without = [patch.slug for patch in load() if not patch.sites(facts)]
    not_needed = ", ".join(f"`{slug}`" for slug in without)
    found = [c for c in table.known_cells() if c.release == release]
    sides = (_pairs(Counter(c.stock for c in found)), _pairs(Counter(c.kvpatch for c in found)))
    return (release, f"`{facts.generation}`", _left_open(release), not_needed or "none", *sides)


def _left_open(release: str) -> str:
    if not states_layout(release):
        return "block size, item size, layout"
    if not states_block_size(release):
        return "block size, item size"
    return "nothing" if states_kernel_blocks(release) else "kernel blocks"


def _pairs(counts: Counter[str]) -> str:
    wrong = counts["corrupt"]
    return f"{counts['identical']} of {counts.total()}" + (f", **{wrong} wrong**" if wrong else "")
