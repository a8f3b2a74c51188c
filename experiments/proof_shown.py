"""What the proofs have found, as people see it, and what it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from experiments.engines import fault_loads, good_loads, lease_loads, load_costs
from experiments.goals import Goal


def good_table(rows: Sequence[good_loads.Row]) -> Table:
    """What D's instruments have said of good loads."""
    shown = Table(title="good loads, by D's /metrics")
    for name in (
        "P to D", "type", "model", "requests", "loads", "stale", "held", "unproven",
        "digest: checked", "partly", "alarms", "unchecked", "witness: good", "alarms",
        "learnt from", "not witnessed", "sampled", "wrong", "failed", "loads/s",
    ):  # fmt: skip
        shown.add_column(name, justify="left" if name in ("P to D", "type", "model") else "right")
    for row in rows:
        shown.add_row(
            *(row.pair, row.dtype, row.model, str(row.requests)),
            *(str(row.count("loads", of)) for of in ("received", "stale")),
            *(str(row.count("load_holds", of)) for of in ("held", "unproven")),
            *(
                str(row.count("load_digests", of))
                for of in ("checked", "partly", "alarm", "unchecked")
            ),
            *(
                str(row.count("witnessed_loads", of))
                for of in ("good", "alarm", "learnt", "not_witnessed")
            ),
            *(str(row.sampled), str(row.wrong), str(row.failed)),
            f"{row.requests / row.seconds:.1f}",
        )
    return shown


def fault_table(rows: Sequence[fault_loads.Row]) -> Table:
    """Who has noticed wrong loads, all lengths of a fault together."""
    shown = Table(title="wrong bytes on purpose")
    for name in (
        "P to D", "type", "looked at by", "fault", "at", "loads", "by digest", "by witness",
        "failed", "right", "wrong", "taken back", "of undone wrong", "missed", "of these wrong",
        "not spoilt",
    ):  # fmt: skip
        words = ("P to D", "type", "looked at by", "fault", "at")
        shown.add_column(name, justify="left" if name in words else "right")
    counts = (
        "loads", "digest", "witness", "failed", "right", "wrong", "taken_back", "undone_wrong",
        "missed", "missed_wrong", "not_spoilt",
    )  # fmt: skip
    for heads, its in by_fault(rows).items():
        shown.add_row(*heads, *(str(sum(getattr(row, name) for row in its)) for name in counts))
    return shown


def cost_table(rows: Sequence[load_costs.Row]) -> Table:
    """What each instrument costs."""
    shown = Table("with", "type", "turns", "stock, ms", "with it, ms", "ratio", "interval",
                  title="time to first token")  # fmt: skip
    for row in rows:
        shown.add_row(
            *(row.what, row.dtype, str(row.turns)),
            *(f"{row.without_ms:.1f}", f"{row.with_ms:.1f}", f"{row.ratio:.3f}"),
            f"{row.low:.3f} to {row.high:.3f}",
        )
    return shown


def clocked_table(rows: Sequence[load_costs.ClockedRow]) -> Table:
    """What each instrument does for a load."""
    shown = Table("instrument", "type", "loads", "first token, ms", "of it at P, ms", "at D, ms",
                  "share", title="by a clock")  # fmt: skip
    for row in rows:
        shown.add_row(
            *(row.what, row.dtype, str(row.loads), f"{row.first_token_ms:.1f}"),
            *(f"{row.of_p_ms:.3f}", f"{row.of_d_ms:.3f}", f"{100 * row.share:.3f} %"),
        )
    return shown


def by_fault(rows: Sequence[fault_loads.Row]) -> dict[tuple[str, ...], list[fault_loads.Row]]:
    """All lengths of each fault of each pair in each setting."""
    found: dict[tuple[str, ...], list[fault_loads.Row]] = {}
    for row in rows:
        heads = (row.pair, row.dtype, row.by, row.fault, row.side)
        found.setdefault(heads, []).append(row)
    return found


def lease_table(rows: Sequence[lease_loads.Row]) -> Table:
    """What D has said of loads that came too late."""
    shown = Table("kvpatch on", "type", "requests", "right", "wrong", "failed", "gone, by P's word",
                  "by digest", "by witness", "witness: good", title="a lease of 2 s")  # fmt: skip
    for row in rows:
        shown.add_row(
            *(row.setting, row.dtype, str(row.requests)),
            *(str(row.right), str(row.wrong), str(row.failed)),
            *(str(row.count("load_holds", "gone")), str(row.count("load_digests", "alarm"))),
            *(str(row.count("witnessed_loads", of)) for of in ("alarm", "good")),
        )
    return shown


def goals(rows: Sequence[Any]) -> list[Goal]:
    """Of all rows."""
    found = []
    for row in (one for one in rows if one.stage == "good"):
        where = f"{row.pair}, {row.dtype}"
        stale = row.count("loads", "stale") + row.count("load_holds", "gone")
        found += [
            Goal(f"{where}: loads called stale", stale, 0),
            Goal(f"{where}: digest alarms", row.count("load_digests", "alarm"), 0),
            Goal(f"{where}: witness alarms", row.count("witnessed_loads", "alarm"), 0),
            Goal(f"{where}: failed", row.failed + row.count("loads", "failed"), 0),
            Goal(f"{where}: wrong answers", row.wrong, 0),
            Goal(f"{where}: loads held", row.count("load_holds", "held"), 1, is_least=True),
            Goal(f"{where}: digests", row.count("load_digests", "checked"), 1, is_least=True),
            Goal(f"{where}: witnessed", row.count("witnessed_loads", "good"), 1, is_least=True),
        ]
    for heads, its in by_fault([row for row in rows if row.stage == "faults"]).items():
        found += fault_goals(", ".join(heads), its)
    for row in (one for one in rows if one.stage == "lease"):
        if row.setting == "both":
            found.append(Goal("a lease of 2 s, both: wrong answers", row.wrong, 0))
        else:
            found.append(Goal("a lease of 2 s, D alone: wrong", row.wrong, 1, is_least=True))
    for row in (one for one in rows if one.stage == "cost"):
        if row.what in ("holds", "holds and witness"):
            found.append(Goal(f"{row.what}: time to first token, of stock's", row.ratio, 1.01))
    for row in (one for one in rows if one.stage == "clocked"):
        found.append(Goal(f"{row.what}: of the time to first token, by a clock", row.share, 0.01))
    return found


def fault_goals(where: str, its: Sequence[fault_loads.Row]) -> list[Goal]:
    """Of one fault of one pair in one setting."""
    loads = sum(row.loads for row in its)
    found = [Goal(f"{where}: loads spoilt", loads, 1, is_least=True)]
    if its[0].by == "digests":
        found.append(Goal(f"{where}: missed", sum(row.missed for row in its), 0))
    elif loads:
        share = sum(row.witness for row in its) / loads
        wanted = fault_loads.WITNESSED.get(its[0].fault, 0.0)
        found.append(Goal(f"{where}: noticed", share, wanted, is_least=True))
    found.append(Goal(f"{where}: undone and wrong", sum(row.undone_wrong for row in its), 0))
    found.append(Goal(f"{where}: failed", sum(row.failed for row in its), 0))
    return found
