"""A plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpatch.tools.planning.numbers import Numbers
from kvpatch.tools.planning.pair import Outcome, Verdict
from kvpatch.tools.planning.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {Outcome.IDENTICAL: "green", Outcome.WRONG: "bold red"}


def show(plan: Plan, console: Console) -> None:
    """Prints what becomes of the pair, what it costs, what to change, and what was assumed."""
    console.print(_outcomes(plan))
    if plan.numbers is not None:
        console.print(_numbers(plan.numbers, plan))
    if plan.findings:
        console.print(_findings(plan))
    verdict = "serves as it is" if plan.serves else "does not serve as it is"
    style = "green" if plan.serves else "red"
    console.print(f"This pair {verdict}.", style=style, markup=False)
    known = tuple(_known(plan))
    for title, lines in (
        ("change", plan.changes),
        ("known", known),
        ("taken for granted", plan.assumed),
    ):
        for line in lines:
            console.print(f"{title}: {line}", markup=False, soft_wrap=True, highlight=False)


def _known(plan: Plan) -> Iterator[str]:
    """What is known of running engines, by where from."""
    for engine in plan.pair.sides:
        running = engine.arguments.running
        if running is None:
            continue
        by_address: dict[str, list[str]] = {}
        for name, fact in engine.arguments.facts().items():
            by_address.setdefault(fact["from"], []).append(name)
        for address, names in by_address.items():
            yield f"{engine.role}, from {address}: {', '.join(names)}"


def _outcomes(plan: Plan) -> Table:
    from rich.table import Table

    table = Table(title="kvpatch plan", show_header=False)
    table.add_row("P", str(plan.pair.prefill))
    table.add_row("D", str(plan.pair.decode))
    table.add_row("ENABLE_KVPATCH on D", "on" if plan.pair.decode.has_kvpatch else "off")
    table.add_row("stock vLLM", _told(plan.stock), style=_style(plan.stock))
    if plan.stock_new.outcome is not plan.stock.outcome:
        new = plan.stock_new
        table.add_row("  prompts that D has nothing of", _told(new), style=_style(new))
    ours = plan.kvpatch
    table.add_row(
        "kvpatch on D", f"{_told(ours.verdict)}\n({ours.way})", style=_style(ours.verdict)
    )
    return table


def _style(verdict: Verdict) -> str:
    return _STYLES.get(verdict.outcome, "red")


def _told(verdict: Verdict) -> str:
    said = verdict.outcome.value
    return f"{said}: {verdict.reason}" if verdict.reason else said


def _numbers(numbers: Numbers, plan: Plan) -> Table:
    from rich.table import Table

    request = plan.request
    cached = f", {request.cached} of them in D's cache" if request.cached else ""
    whose = "kvpatch" if plan.kvpatch.mappings else "vLLM"
    title = f"a request of {request.tokens} tokens{cached}, on each worker of D"
    table = Table(title=title, show_header=False)
    for name, value in _rows(numbers, whose):
        table.add_row(name, value)
    return table


def _rows(numbers: Numbers, whose: str) -> Iterator[tuple[str, str]]:
    regions = numbers.direct_regions + numbers.staged_regions
    yield f"read by {whose}", f"{numbers.way}, {regions} regions"
    yield "NIXL descriptors", f"{numbers.descriptors:,}"
    yield (
        "bytes over the wire",
        f"{_bytes(numbers.size_bytes)} ({_bytes(numbers.wanted_bytes)} wanted)",
    )
    yield "staging memory in use", _bytes(numbers.staging_bytes)
    yield "time, an estimate", f"{_seconds(numbers.seconds)}; costs: {numbers.costs_of}"


def _findings(plan: Plan) -> Table:
    from rich.table import Table

    table = Table("preflight", "", "what")
    for found in plan.findings:
        style = "red" if found.level == "error" else "yellow"
        table.add_row(found.level, found.side, found.what, style=style)
    return table


def _bytes(size: int) -> str:
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
