"""Rows of docs/data from what the benchmarks write with --json."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


TABLES: dict[str, Callable[[Raw], Made]] = {
    made.__name__: made for made in (transfer, serving, drill)
}
