"""docs/explanation/kinds.md: the table of kinds, from the table itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from kvpatch.worker.cache_kinds import BACKENDS, DERIVED, SPECS, WITH_DTYPE, WITH_VARIABLE, Kind

from .kinds_played import played
from .tables import ROOT, remade, rows_below

PAGE = ROOT / "docs" / "explanation" / "kinds.md"


def page() -> str:
    """The whole document."""
    rows = [
        (
            kind.contents,
            kind.holds.value + _heads(kind),
            ", ".join(sorted(names)),
            played(kind.contents),
        )
        for kind, names in sorted(
            kinds().items(), key=lambda of: (of[0].holds.name, of[0].contents)
        )
    ]
    silent = ", ".join(f"`{name}`" for name, kind in SPECS.items() if kind is None)
    return remade(
        PAGE,
        rows_below(("a block holds", "so it is", "told by", "played by"), rows),
        (r"(Specs that say nothing beside the backend: ).*(?=\.\n)", silent),
    )


def kinds() -> Mapping[Kind, list[str]]:
    """What tells each kind, in Markdown."""
    told: defaultdict[Kind, list[str]] = defaultdict(list)
    for name, kind in BACKENDS.items():
        told[kind].append(f"`{name}`")
    for name, (variable, kind) in WITH_VARIABLE.items():
        told[kind].append(f"`{name}` with `{variable}`")
    for start, kind in WITH_DTYPE.items():
        told[kind].append(f"`--kv-cache-dtype {start}...`")
    for prefix, kind in DERIVED.items():
        told[kind].append(f"`{prefix}...`")
    for name, of_spec in SPECS.items():
        if of_spec is not None:
            told[of_spec].append(f"`{name}`")
    return told


def _heads(kind: Kind) -> str:
    return (", heads mixed" if kind.mixes_heads else "") + (", which join" if kind.joins else "")
