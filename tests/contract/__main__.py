"""``python -m tests.contract RELEASE``: what moved in a release, before it is listed.

``python -m tests.contract --write``: record fingerprints and write the generated pages;
``--pages``: write the pages alone.
"""

from __future__ import annotations

import argparse
import difflib
import sys

from rich.console import Console
from rich.table import Table

from kvpatch.core.releases import FACTS, RELEASES, ReleaseFacts, facts_named
from kvpatch.patches import load
from tests.releases.fetch import FetchFailed, fetch

from . import contract, facts, pages
from .relied_on import bodies
from .source import method


def main() -> int:
    """Exit status 0 when the release fits a generation as it is, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description=__doc__)
    parser.add_argument("release", nargs="?", help="a vLLM release, listed or not")
    parser.add_argument(
        "--against", help="the release or generation to compare with (default: the newest)"
    )
    parser.add_argument("--write", action="store_true", help="record fingerprints, write the pages")
    parser.add_argument("--pages", action="store_true", help="write the pages")
    arguments = parser.parse_args()
    if arguments.write or arguments.pages:
        return _write(with_fingerprints=arguments.write)
    if not arguments.release:
        parser.error("name a release, or give --write")
    against = facts_named(arguments.against) if arguments.against else _nearest(arguments)
    try:
        fetch([arguments.release, against.release])
    except FetchFailed as error:
        print(error, file=sys.stderr)
        return 1
    return _compare(arguments.release, against)


def _nearest(arguments: argparse.Namespace) -> ReleaseFacts:
    return FACTS.get(arguments.release, FACTS[RELEASES[-1]])


def _write(with_fingerprints: bool) -> int:
    fetch(RELEASES)
    if with_fingerprints:
        contract.record({r: contract.fingerprints(r, FACTS[r]) for r in RELEASES})
        print(f"wrote {contract.DATA.name}")
    for path in pages.write():
        print(f"wrote {path.name}")
    return 0


def _compare(release: str, against: ReleaseFacts) -> int:
    console = Console()
    baseline = against.release
    cells = Table("patch", "outcome", "why", title=f"vLLM {release} with the facts of {baseline}")
    refused = False
    for patch in load():
        outcome = contract.cell(patch, release, against)
        refused |= outcome.outcome == "refused"
        cells.add_row(patch.slug, outcome.outcome, outcome.reason)
    console.print(cells)
    moved = Table("body", "against " + baseline, title="bodies that patches lean on")
    any_moved = False
    for module, name in bodies(against):
        here, there = method(release, module, name), method(baseline, module, name)
        if isinstance(here, str) or isinstance(there, str):
            verdict, is_moved = str(here), True
        elif here == there:
            verdict, is_moved = "same", False
        else:
            lines = list(difflib.unified_diff(there.lines, here.lines, n=0, lineterm=""))[2:]
            added = sum(line.startswith("+") for line in lines)
            removed = sum(line.startswith("-") for line in lines)
            verdict, is_moved = f"changed: {added} lines added, {removed} removed", True
        any_moved |= is_moved
        moved.add_row(name, verdict, style="yellow" if is_moved else "")
    console.print(moved)
    changed = facts.differences(against, facts.read(release))
    lost: dict[str, list[str]] = {}
    for name, (before, now) in changed.items():
        if isinstance(now, facts.NotFound):
            lost.setdefault(now.why, []).append(name)
        else:
            console.print(f"{name}: {before!r} in {baseline}, and now {now!r}")
    for why, names in lost.items():
        console.print(f"{release} does not tell {', '.join(names)}: {why}", markup=False)
    if refused or changed:
        console.print("This release needs facts of its own in kvpatch/core/releases.py.")
    elif any_moved:
        console.print(
            "Sites and facts hold, bodies moved: read them, run the lab on this release, then add "
            "it to kvpatch/core/releases.py, and --write."
        )
    else:
        console.print(f"Nothing moved: add it to kvpatch/core/releases.py, as {baseline}.")
    return int(refused or any_moved or bool(changed))


if __name__ == "__main__":
    sys.exit(main())
