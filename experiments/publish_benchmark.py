"""Brings what a benchmark has written with --json into the documentation.

    python experiments/publish_benchmark.py transfer transfer.json --note "Nothing ran beside it."

Writes docs/data/NAME.json, with today's date and this commit. Then `python -m tests.contract
--pages` brings the table onto its page. Several files of one benchmark are taken together.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.played import write_table

_DATA = Path(__file__).resolve().parent.parent / "docs" / "data"
_SERVED = "0.32.0"
#: The benchmarks that start vLLM's engines.
_SCRIPTS = {"serving": "experiments/bench_serving.sh", "drill": "experiments/drill.sh"}

Raw = Any
"""What a benchmark has written, read back."""


class Made(NamedTuple):
    """A table of docs/data."""

    columns: tuple[str, ...]
    rows: list[list[str]]


def transfer(raw: Raw) -> Made:
    """A row for each pair: what stock reads between like engines, and both of our ways."""
    ways: dict[str, dict[str, Any]] = {}
    for row in raw:
        ways.setdefault(row["pair"], {})[row["way"].removesuffix(" (auto)")] = row
    rows = []
    for pair, found in ways.items():
        stock, direct, staged = (found[way] for way in ("stock, both like P", "direct", "staged"))
        chosen = "direct" if direct["way"].endswith("(auto)") else "staged"
        rows.append(
            [
                pair, f"{stock['gb_per_second']:.1f}", f"{direct['gb_per_second']:.1f}",
                f"{staged['gb_per_second']:.1f}", chosen, f"{found[chosen]['of_like_p']:.2f}",
                f"{staged['of_bound']:.2f}",
                f"{staged['working_seconds'] * 1e3:.0f} + {staged['waiting_seconds'] * 1e3:.0f}",
            ]
        )  # fmt: skip
    columns = ("P → D", "stock, like engines, GB/s", "direct", "staged", "read as",
               "of stock's", "staged, of its bound", "staged: works + waits, ms")  # fmt: skip
    return Made(columns, rows)


def serving(raw: Raw) -> Made:
    """A row for each pair, D idle and busy."""
    rows = []
    for pair in raw:
        for when in ("idle", "busy"):
            loads = pair[when]
            row = [pair["pair"], when, str(len(loads))]
            for what in ("first_token_s", "of_d_s"):
                row += [f"{1e3 * statistics.median(load[what] for load in loads):.0f}",
                        _quartiles(loads, what)]  # fmt: skip
            rates = [
                statistics.median(pair[name]) for name in ("tokens_per_s", "like_tokens_per_s")
            ]
            row.append("{:.0f} beside {:.0f}".format(*rates) if when == "busy" else "")
            rows.append(row)
    columns = ("pair", "D", "prompts", "first token, ms", "of the like pair's", "of D, ms",
               "of the like pair's", "others' tokens a second")  # fmt: skip
    return Made(columns, rows)


def _quartiles(loads: Sequence[Mapping[str, float]], what: str) -> str:
    each = [load[what] / load[f"like_{what}"] for load in loads]
    lower, middle, upper = statistics.quantiles(each, n=4)
    return f"{middle:.2f} ({lower:.2f} to {upper:.2f})"


def drill(raw: Raw) -> Made:
    """A row for each fault and pair."""
    pairs = {"stock": "stock", "d-alone": "kvpatch on D", "both": "kvpatch on both"}
    faults = {
        "stale": "D held up past the lease",
        "link": "P held up as D reads",
        "replaced": "P killed and back under its id before D reads",
        "kill-p": "P killed among requests, back under its id",
        "kill-d": "D killed among requests, back under its id",
    }
    rows = []
    for fault, said in faults.items():
        for row in (one for one in raw if one["scene"] == fault and one["pair"] in pairs):
            broken = row["broken_at_p"] + row["broken_at_d"]
            counted = "-" if row["counted_at_d"] is None else str(row["counted_at_d"])
            rows.append(
                [
                    said, pairs[row["pair"]], f"{row['requests']:,}", str(row["right"]),
                    str(row["wrong"]), str(row["failed_at_d"]), counted, str(broken),
                    str(row["no_answer"]),
                    f"{row['again_right']} of {sum(row[f'again_{how}'] for how in _JUDGED)}",
                ]
            )  # fmt: skip
    columns = ("fault", "P and D", "requests", "right", "wrong, HTTP 200", "failed at D",
               "D's count", "connection broken", "no answer", "asked again: right")  # fmt: skip
    return Made(columns, rows)


_JUDGED = ("right", "wrong", "failed")


def link(raw: Raw) -> Made:
    """A row for each link and pair."""
    ways: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in raw:
        on = row["gbit_per_second"], row["delay_ms"], row["pair"]
        ways.setdefault(on, {})[row["way"]] = row
    rows = [
        [
            f"{gbit:g}", f"{delay_ms:g}", pair, f"{found['like']['seconds'] * 1e3:.0f}",
            f"{found['direct']['of_like']:.2f}" if "direct" in found else "",
            f"{found['staged']['of_like']:.2f}",
        ]
        for (gbit, delay_ms, pair), found in ways.items()
    ]  # fmt: skip
    columns = ("Gbit/s", "delay, ms", "P → D", "the like load, ms", "direct, of its time", "staged")
    return Made(columns, rows)


TABLES: dict[str, Callable[[Raw], Made]] = {
    made.__name__: made for made in (transfer, serving, drill, link)
}


def main() -> None:
    """Reads the results, and writes the data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(TABLES))
    parser.add_argument("raw", type=Path, nargs="+", help="what the benchmark's --json wrote")
    parser.add_argument("--note", required=True, help="the machine, and what ran beside it")
    options = parser.parse_args()
    found = [json.loads(path.read_text()) for path in options.raw]
    raw = found[0] if len(found) == 1 else [row for rows in found for row in rows]
    script = _SCRIPTS.get(options.name)
    write_table(
        _DATA / f"{options.name}.json",
        script or f"experiments/bench_{options.name}.py",
        _SERVED if script else "",
        options.note,
        *TABLES[options.name](raw),
    )


if __name__ == "__main__":
    main()
