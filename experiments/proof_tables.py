"""Rows of docs/data from what the proofs write with --json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Raw = Any
"""What a run has written, read back."""


def good_rows(raw: Raw) -> tuple[tuple[str, ...], list[list[str]]]:
    """A row for each pair, type and model."""
    rows = []
    for row in (one for one in raw if one["stage"] == "good"):
        counts = row["counts"]

        def count(metric: str, *labels: str, counts: Mapping[str, int] = counts) -> str:
            return f"{sum(counts.get(f'{metric} {label}', 0) for label in labels):,}"

        rows.append(
            [
                row["pair"], row["dtype"], row["model"], count("loads", "received"),
                count("load_holds", "gone", "expired"), count("load_holds", "unproven"),
                count("load_digests", "checked"), count("load_digests", "partly"),
                count("load_digests", "unchecked"),
                count("load_digests", "alarm"), count("witnessed_loads", "good"),
                count("witnessed_loads", "learnt"), count("witnessed_loads", "not_witnessed"),
                count("witnessed_loads", "alarm"), f"{row['sampled']:,}", str(row["wrong"]),
                str(row["failed"]),
            ]
        )  # fmt: skip
    columns = (
        "P → D", "type", "model", "loads", "stale", "hold not stated", "digest: checked",
        "partly", "unchecked", "alarms", "witness: good", "learnt from", "not witnessed", "alarms",
        "answers compared", "other ones", "failed",
    )  # fmt: skip
    return columns, rows


def fault_rows(raw: Raw) -> tuple[tuple[str, ...], list[list[str]]]:
    """A row for each fault, type and model, all pairs together: digests beside the witness."""
    rows = []
    lengths = sorted({(row["shortest"], row["longest"]) for row in _faults(raw)})
    for (fault, side, dtype, model), its in _by(
        _faults(raw), "fault", "side", "dtype", "model"
    ).items():
        digests = [row for row in its if row["by"] == "digests"]
        witness = [row for row in its if row["by"] == "witness"]
        shares = [
            _of([row for row in witness if row["shortest"] == low], "witness") for low, _ in lengths
        ]
        rows.append(
            [
                fault if side == "D" else f"{fault}, at P", dtype, model,
                _of(digests, "digest"), *shares,
                _of(witness, "missed_wrong", "missed"),
            ]
        )  # fmt: skip
    columns = (
        "fault", "type", "model", "noticed by digests",
        *(f"by the witness, {low} to {high} tokens" for low, high in lengths),
        "other tokens behind what it missed",
    )  # fmt: skip
    return columns, rows


def recovery_rows(raw: Raw) -> tuple[tuple[str, ...], list[list[str]]]:
    """A row for each pair, type, model and way of noticing, all faults together."""
    rows = []
    for (by, pair, dtype, model), its in _by(_faults(raw), "by", "pair", "dtype", "model").items():
        noticed, undone = ("digest", "digest") if by == "digests" else ("witness", "taken_back")
        rows.append(
            [
                by, pair, dtype, model, str(_sum(its, "loads")), str(_sum(its, noticed)),
                str(_sum(its, undone)), str(_sum(its, undone) - _sum(its, "undone_wrong")),
                str(_sum(its, "undone_wrong")), str(_sum(its, "failed")),
            ]
        )  # fmt: skip
    columns = (
        "looked at by", "P → D", "type", "model", "loads with wrong bytes", "noticed",
        "computed again", "answers as of one engine", "other answers", "failed",
    )  # fmt: skip
    return columns, rows


def lease_rows(raw: Raw) -> tuple[tuple[str, ...], list[list[str]]]:
    """A row for each pair whose lease ends."""
    rows = []
    for row in (one for one in raw if one["stage"] == "lease"):
        counts = row["counts"]
        said = (("load_holds", "gone"), ("witnessed_loads", "alarm"))
        rows.append(
            [
                row["setting"], row["dtype"], *(f"{row[name]:,}" for name in _OUTCOMES),
                *(str(counts.get(f"{metric} {label}", 0)) for metric, label in said),
            ]
        )  # fmt: skip
    columns = ("kvpatch on", "type", "requests", "right", "wrong, HTTP 200", "failed",
               "gone, by P's word", "alarms of the witness")  # fmt: skip
    return columns, rows


_OUTCOMES = ("requests", "right", "wrong", "failed")


_WHAT = {"cost": "{}", "switched": "{}, in one pair, of every other load"}


def cost_rows(raw: Raw) -> tuple[tuple[str, ...], list[list[str]]]:
    """A row for each instrument."""
    rows = [
        [
            _WHAT[row["stage"]].format(row["what"]), row["dtype"], str(row["turns"]),
            f"{row['without_ms']:.1f}", f"{row['with_ms']:.1f}", f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
        ]
        for row in raw
        if row["stage"] in _WHAT
    ]  # fmt: skip
    columns = ("pair", "type", "turns", "stock beside it, ms", "first token, ms", "of stock's time",
               "interval, 95 of 100 drawings")  # fmt: skip
    return columns, rows


def clocked_rows(raw: Raw) -> tuple[tuple[str, ...], list[list[str]]]:
    """A row for each instrument."""
    rows = []
    for row in (one for one in raw if one["stage"] == "clocked"):
        share = (row["of_p_ms"] + row["of_d_ms"]) / row["first_token_ms"]
        rows.append([
            row["what"], row["dtype"], str(row["loads"]), f"{row['first_token_ms']:.0f}",
            f"{1e3 * row['of_p_ms']:.0f}", f"{1e3 * row['of_d_ms']:.0f}", f"{100 * share:.2f} %",
        ])  # fmt: skip
    columns = ("instrument", "type", "loads", "first token, ms", "of it at P, µs", "at D, µs",
               "of the time to first token")  # fmt: skip
    return columns, rows


def _faults(raw: Raw) -> list[Any]:
    return [one for one in raw if one["stage"] == "faults"]


def _by(rows: Iterable[Any], *names: str) -> dict[tuple[Any, ...], list[Any]]:
    found: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _sum(rows: Sequence[Any], name: str) -> int:
    return sum(row[name] for row in rows)


def _of(rows: Sequence[Any], name: str, of: str = "loads") -> str:
    return f"{_sum(rows, name)} of {_sum(rows, of)}" if rows else "-"
