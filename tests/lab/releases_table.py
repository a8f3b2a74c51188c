"""``python -m tests.lab.releases_table [--pair 0.31.0-0.32.0 ...] [--neighbours] [--write]``

Plays P of one release and D of another, on stock and with kvpatch on D, and keeps what came of it
in docs/data/unlike_releases.json, from which docs/evidence/unlike_releases.md is made. Pairs that
are not played keep their rows, and a row is written as soon as it is played: a run that was stopped
goes on with ``--missing``.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch.core.releases import FACTS, GENERATIONS, RELEASES
from tests.played import Played, now
from tests.releases.fetch import fetch

from .case import Case, Report
from .table import LETTERS, write_rows
from .unlike_releases import ANY_HASH, Labs, Pair, all_pairs, by_nearness, cases, neighbours

_DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = _DOCS / "evidence" / "unlike_releases.md"
DATA = _DOCS / "data" / "unlike_releases.json"
_WORDS = {
    "I": "ok",
    "R": "no",
    "F": "no",
    "C": "**wrong**",
    "r": "**ends P's**",
    "f": "**ends P's**",
}
_LATE = ("no answer within", "Unfinished")
_ACCEPTS = ("KVPATCH_ACCEPT", "vllm_version")
#: Labs at a time, of half a gigabyte each: every pair has its turn, and to open one takes longest.
_MOST_OPEN = 8


class Row(NamedTuple):
    """What became of a pair: a letter for each case, small where P answers nobody any more."""

    stock: str
    kvpatch: str
    run: Played


def letter(report: Report) -> str:
    """The outcome, and whether P's listener has survived."""
    found = LETTERS[report.outcome]
    return found if report.listens else found.lower()


def is_read(pair: Pair) -> bool:
    """Whether the handshakes of both have a hash: kvpatch reads between no others."""
    return all(FACTS[release].encodes_metadata for release in pair)


def can_ask(pair: Pair) -> bool:
    """Whether D has a question that P's listener survives.

    Of 0.11.1 to 0.12 nothing that P answers tells that it is not an earlier one.
    """
    prefill, decode = (FACTS[release] for release in pair)
    is_early = decode.question == "at a port" and not prefill.encodes_metadata
    return not is_early or prefill.question == "at a port"


def with_kvpatch(case: Case) -> Case:
    """The case with kvpatch on D, which accepts other releases alone; P is stock."""
    accepting = replace(case.decode, settings=(*case.decode.settings, _ACCEPTS))
    return replace(case, decode=accepting).patched(prefill=False)


def _run(labs: Labs, pair: Pair, case: Case, **more: Any) -> Report:
    """Plays a case, and once more where an answer did not come in time: other labs may be busy.

    None comes from a P whose listener has ended.
    """
    report = labs.run(pair, case, **more)
    is_failed = report.outcome == "failed" and report.listens
    is_late = is_failed and any(word in report.detail for word in _LATE)
    return labs.run(pair, case, **more) if is_late else report


def play(labs: Labs, pair: Pair) -> Row:
    """Plays every case of a pair, on stock and with kvpatch on D."""
    stock, ours = "", ""
    for case in cases().values():
        # By the first handshake that ends P's listener: nothing comes after it.
        is_ended = stock[-1:].islower()
        stock += stock[-1] if is_ended else letter(_run(labs, pair, case.stock(), extra=ANY_HASH))
        ours += letter(_run(labs, pair, with_kvpatch(case)))
    return Row(stock, ours, now())


@cache
def known() -> Mapping[Pair, Row]:
    """Every row of docs/data/unlike_releases.json; nothing of one that has other cases."""
    data = json.loads(DATA.read_text()) if DATA.exists() else {"cases": None}
    if data["cases"] != list(cases()):
        return {}
    return {
        Pair(*name.split("-")): Row(
            row["stock"], row["kvpatch"], Played(row["date"], row["commit"])
        )
        for name, row in data["releases"].items()
    }


def keep(rows: Mapping[Pair, Row]) -> None:
    head = {
        "made_by": "python -m tests.lab.releases_table --write",
        "letters": {letter: outcome for outcome, letter in LETTERS.items()}
        | {"r, f": "as the large letter, and P answers no handshake any more"},
        "cases": list(cases()),
    }
    found = {
        str(pair): {**vars(row.run), "stock": row.stock, "kvpatch": row.kvpatch}
        for pair, row in sorted(rows.items(), key=lambda one: _order(one[0]))
    }
    write_rows(DATA, head, found)


def _order(pair: Pair) -> tuple[int, int]:
    return RELEASES.index(pair.prefill), RELEASES.index(pair.decode)


def known_page() -> str:
    return page(known())


def page(rows: Mapping[Pair, Row]) -> str:
    stock = Counter("".join(row.stock for row in rows.values()))
    ours = Counter("".join(row.kvpatch for row in rows.values()))
    lines = [
        "# Unlike releases",
        "",
        "Can P and D have different releases? The lab plays one release's connector as P and",
        "another one's as D, over real NIXL in host memory, and compares D's cache with P's",
        "element by element. P is stock, and kvpatch is on D alone. From 0.13 on stock refuses",
        "all of these pairs by its hash. Here that check is off in stock",
        "(`enforce_handshake_compat: false`), and kvpatch accepts the release alone",
        "(`KVPATCH_ACCEPT=vllm_version`). FlashAttention in HND,",
        f"{_listed(cases())}. `python -m tests.lab.releases_table --write` makes",
        "docs/data/unlike_releases.json and this page.",
        "",
        "| | identical | refused | not completed | corrupt | P's listener has ended |",
        "|---|---|---|---|---|---|",
        _sum_row("stock", stock),
        _sum_row("kvpatch on D", ours),
        "",
        "A question that P's listener does not expect ends it: D of 0.11.1 to 0.25 and P from 0.26",
        "on, and the other way round. No D can shake hands with such a P before a restart.",
        "",
        "## Neighbours",
        "",
        "What a rolling upgrade meets, by the side that is upgraded first. Each cell is stock →",
        f"kvpatch on D, of {_listed(cases())}: ok (identical), no (refused or",
        "not completed), **wrong** (corrupt), **ends P's** (listener).",
        "",
        "| releases | P first | D first |",
        "|---|---|---|",
        *_neighbour_rows(rows),
        "",
        "## Generations",
        "",
        "The newest release of each generation, kvpatch on D; rows are P, columns D. One letter",
        "for each case: I identical, R refused, F not completed, C corrupt; small if P's listener",
        "ended.",
        "",
        *_matrix(rows),
    ]
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last} tokens a block" if first else last


def _sum_row(name: str, counts: Counter[str]) -> str:
    ended = counts["r"] + counts["f"]
    cells = [counts["I"], counts["R"], counts["F"], counts["C"], ended]
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def _neighbour_rows(rows: Mapping[Pair, Row]) -> Iterator[str]:
    for old, new in zip(RELEASES, RELEASES[1:], strict=False):
        found = [rows.get(pair) for pair in (Pair(new, old), Pair(old, new))]
        if any(found):
            yield f"| {old}, {new} | " + " | ".join(_cell(row) for row in found) + " |"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{_words(row.stock)} → {_words(row.kvpatch)}"


def _words(letters: str) -> str:
    words = [_WORDS[letter] for letter in letters]
    return words[0] if len(set(words)) == 1 else ", ".join(words)


def _matrix(rows: Mapping[Pair, Row]) -> Iterator[str]:
    ends = [releases[-1] for releases in GENERATIONS.values()]
    far = [pair for pair in rows if set(pair) <= set(ends)]
    shown = [release for release in ends if any(release in pair for pair in far)]
    if not shown:
        return
    yield "| P \\ D | " + " | ".join(shown) + " |"
    yield "|---|" + "---|" * len(shown)
    for prefill in shown:
        cells = (rows.get(Pair(prefill, decode)) for decode in shown)
        yield f"| {prefill} | " + " | ".join(row.kvpatch if row else "" for row in cells) + " |"


def main() -> None:
    """Plays; exit status 1 where kvpatch corrupts."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.releases_table", description=__doc__)
    parser.add_argument("--pair", action="append", help="P-D; may be given again; default: all")
    parser.add_argument("--neighbours", action="store_true", help="no other pairs")
    parser.add_argument("--missing", action="store_true", help="no pairs that have a row")
    parser.add_argument("--write", action="store_true", help=f"write {DATA.name} and {PAGE.name}")
    arguments = parser.parse_args()
    default = neighbours() if arguments.neighbours else all_pairs()
    pairs = [Pair(*name.split("-")) for name in arguments.pair or ()] or default
    found = dict(known())
    if arguments.missing:
        pairs = [pair for pair in pairs if pair not in found]
    _play_all(pairs, found, is_kept=arguments.write)
    if arguments.write:
        PAGE.write_text(page(found))
    if any("C" in found[pair].kvpatch for pair in pairs):
        raise SystemExit(1)


def _play_all(pairs: Sequence[Pair], found: dict[Pair, Row], *, is_kept: bool) -> None:
    fetch(sorted({release for pair in pairs for release in pair}, key=RELEASES.index))
    with Labs(_MOST_OPEN) as labs:
        for pair in by_nearness(pairs, _MOST_OPEN):
            found[pair] = row = play(labs, pair)
            print(pair, row.stock, row.kvpatch, flush=True)
            if is_kept:  # an hour of them: none is lost
                keep(found)


if __name__ == "__main__":
    main()
