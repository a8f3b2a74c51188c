"""``python -m tests.contract RELEASE``: what moved in a release, before it is listed.

``python -m tests.contract --write``: record fingerprints and write the generated pages;
``--pages``: write the pages alone.
"""

from __future__ import annotations

import argparse
import difflib
import sys

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


def _moved(release: str, baseline: str, code: tuple[str, str]) -> str:
    """How a body differs from the baseline's; empty where it does not."""
    here, there = method(release, *code), method(baseline, *code)
    if isinstance(here, str) or isinstance(there, str):
        return str(here)
    lines = list(difflib.unified_diff(there.lines, here.lines, n=0, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return "" if here == there else f"changed: {added} lines added, {removed} removed"


def _compare(release: str, against: ReleaseFacts) -> int:
    baseline = against.release
    cells = {patch.slug: contract.cell(patch, release, against) for patch in load()}
    print(f"The patches on vLLM {release}, with the facts of {baseline}:")
    for slug, cell in cells.items():
        print(f"  {slug}: {cell.outcome}{f', {cell.reason}' if cell.reason else ''}")
    refused = any(cell.outcome == "refused" for cell in cells.values())
    found = [(module, name.removeprefix(".")) for module, name in bodies(against)]
    moved = {code: how for code in found if (how := _moved(release, baseline, code))}
    print(f"Of {len(found)} bodies that patches lean on, {len(moved)} are not {baseline}'s:")
    for (_, name), how in moved.items():
        print(f"  {name}: {how}")
    changed = facts.differences(against, facts.read(release))
    lost: dict[str, list[str]] = {}
    for name, (before, now) in changed.items():
        if isinstance(now, facts.NotFound):
            lost.setdefault(now.why, []).append(name)
        else:
            print(f"{name}: {before!r} in {baseline}, and now {now!r}")
    for why, names in lost.items():
        print(f"{release} does not tell {', '.join(names)}: {why}")
    if refused or changed:
        print("This release needs facts of its own in kvpatch/core/releases.py.")
    elif moved:
        print(
            "Sites and facts hold, bodies moved: read them, run the lab on this release, then add "
            "it to kvpatch/core/releases.py, and --write."
        )
    else:
        print(f"Nothing moved: add it to kvpatch/core/releases.py, as {baseline}.")
    return int(refused or bool(moved) or bool(changed))


if __name__ == "__main__":
    sys.exit(main())
