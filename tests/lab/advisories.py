"""``python -m tests.lab.advisories RELEASE ... [--write]``

Plays what vLLM's advisories of its KV transfer parameters say at each release's own scheduler and
workers, at a stock D and at one with kvpatch. Keeps what came of it in docs/data/advisories.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvpatch.core.releases import FACTS, RELEASES
from tests.played import write_table
from tests.releases.fetch import fetch

from .engine_api import Ask
from .host import Lab
from .stage import Raised, Stage
from .table import are_neighbours, spans_of
from .test_several_peers import SPEC
from .test_transfer_params import ENDS, OWN, TOKENS, Pair, changed

DATA = Path(__file__).resolve().parents[2] / "docs" / "data" / "advisories.json"
#: Of these ranks a list of Python's takes half a GiB: much, and no harm to this machine.
RANKS = 2**24
#: More than a D takes for a load.
_MUCH_KIB = 100 * 1024
_FLAGS = ("do_remote_prefill", "do_remote_decode")
#: After which a handshake has failed.
_OVER_SECONDS = 20
ENDED = "ends"
SURVIVES = "serves on"
GROWS = "takes memory by it"

#: The columns behind the release's.
COLUMNS = (
    "a parameter is missing (CVE-2026-94622): stock D ends by",
    "several prompts (CVE-2026-94623): stock D",
    "large `tp_size` (CVE-2026-94626): stock D",
    "with kvpatch",
)


class Row(NamedTuple):
    """What became of an engine of a release by each advisory."""

    missing: str
    prompts: str
    ranks: str
    kvpatch: str


def play(lab: Lab) -> Row:
    """Each advisory at a release, stock and with kvpatch on D."""
    stock, ours = (
        [advisory(lab, patched) for advisory in _ADVISORIES] for patched in (False, True)
    )
    wrong = [found for found in ours if found != SURVIVES]
    return Row(*stock, "; ".join(wrong) or SURVIVES)


def _missing(lab: Lab, patched: bool) -> str:
    """Each of P's parameters left out, at a D that has met P."""
    with Stage(lab) as stage:
        pair = Pair(stage, FACTS[lab.release], patched=patched)
        fields = [name for name in json.loads(pair.ask().answer) if name not in _FLAGS]
        ends = [f"`{n}`" for n in fields if pair.outcome((n, "absent")).startswith(ENDS)]
        return ", ".join(ends) or _serving_on(pair)


def _several_prompts(lab: Lab, patched: bool) -> str:
    """A longer prompt with the parameters of another one, as one request's prompts have them."""
    with Stage(lab) as stage:
        pair = Pair(stage, FACTS[lab.release], patched=patched)
        longer = Ask(stage.prompt(2 * TOKENS), pair.ask().answer)
        return ENDED if pair.ends(longer) else _serving_on(pair)


def _many_ranks(lab: Lab, patched: bool) -> str:
    """A large ``tp_size`` at a D that has not met P."""
    if "tp_size" not in FACTS[lab.release].params:
        return SURVIVES if patched else "does not read it"
    with Stage(lab) as stage:
        prefill, decode = stage.prefill(SPEC), stage.decode(OWN, patched=patched)
        bad, good = prefill.compute(*stage.prompts(2, TOKENS))
        bad = replace(bad, answer=changed(bad.answer, [("tp_size", RANKS)]))
        before = _most_kib(decode.process.pid)
        try:
            if decode.ask(bad):
                decode.watch(bad.prompt, seconds=_OVER_SECONDS)
            if _most_kib(decode.process.pid) - before > _MUCH_KIB:
                return GROWS
            decode.ask(good)
            is_read = decode.watch(good.prompt, seconds=_OVER_SECONDS).received
        except Raised:
            return ENDED
        return SURVIVES if is_read else "reads nothing more from P"


_ADVISORIES: tuple[Callable[[Lab, bool], str], ...] = (_missing, _several_prompts, _many_ranks)


def _serving_on(pair: Pair) -> str:
    found = pair.outcome_of(pair.ask())
    return SURVIVES if found == "read" else found


def _most_kib(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def known() -> dict[str, Row]:
    rows = json.loads(DATA.read_text())["rows"] if DATA.exists() else []
    return {release: Row(*row) for named, *row in rows for release in _releases_of(named)}


def _releases_of(named: str) -> Iterable[str]:
    first, *more = named.split(" to ")
    last = more[0] if more else first
    return RELEASES[RELEASES.index(first) : RELEASES.index(last) + 1]


def keep(found: dict[str, Row]) -> None:
    """Writes docs/data: neighbours of which the same is so in one row."""
    # A release between them that was not played ends a row.
    spans = spans_of(
        [release for release in RELEASES if release in found],
        lambda a, b: found[a] == found[b] and are_neighbours(a, b),
    )
    rows = [(span, *found[first]) for first, span in spans]
    write_table(
        DATA,
        "python -m tests.lab.advisories --write",
        "",
        f"`{SURVIVES}`: the request fails or is computed, and the next one is served. Large is "
        f"{RANKS:,} ranks.",
        ("vLLM", *COLUMNS),
        rows,
    )


def main() -> None:
    """Plays the releases that are named, or all, and keeps them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=list(RELEASES))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    fetch(arguments.releases)
    for release in arguments.releases:
        with Lab(release) as lab:
            row = play(lab)
        print(release, *row, sep=" | ", flush=True)
        if arguments.write:
            keep({**known(), release: row})


if __name__ == "__main__":
    main()
