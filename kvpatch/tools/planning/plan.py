"""The whole answer: the verdicts on a pair, what to change, and how it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpatch.core import settings
from kvpatch.core.errors import CannotPlan
from kvpatch.tools.planning.arguments import EngineArguments
from kvpatch.tools.planning.engine import engine_of
from kvpatch.tools.planning.known_names import check_weights
from kvpatch.tools.planning.pair import Outcome, Pair, Verdict
from kvpatch.tools.planning.preflight import Finding, findings
from kvpatch.tools.planning.verdicts import verdicts

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {Outcome.IDENTICAL: "green", Outcome.WRONG: "bold red", Outcome.UNKNOWN: "yellow"}


@dataclass(frozen=True)
class Plan:
    """A pair, and what becomes of it.

    Attributes:
        stock: for the worst of several prompts.
        kvpatch: with kvpatch on D.
        changes: what to do, a sentence each; empty where the pair serves as it is.
    """

    pair: Pair
    stock: Verdict
    kvpatch: Verdict
    findings: tuple[Finding, ...]

    @property
    def configured(self) -> Verdict:
        """The verdict on the pair as its arguments have it."""
        return self.kvpatch if self.pair.decode.has_kvpatch else self.stock

    @property
    def serves(self) -> bool:
        """True if the pair can be started as it is."""
        has_errors = any(found.level == "error" for found in self.findings)
        return self.configured.outcome is Outcome.IDENTICAL and not has_errors

    @property
    def assumed(self) -> tuple[str, ...]:
        """The sentences on what the arguments leave open."""
        return (*self.pair.prefill.assumed, *self.pair.decode.assumed)

    @property
    def changes(self) -> tuple[str, ...]:
        """The sentences on what to change; the pair itself comes first."""
        changes = []
        if self.configured.outcome is not Outcome.IDENTICAL:
            if self.kvpatch.outcome is Outcome.IDENTICAL:
                changes.append(f"D: set {settings.ENABLE}=true, with kvpatch installed beside vLLM")
                if self.stock.cure:
                    changes.append(f"or, without kvpatch: {self.stock.cure}")
            elif self.configured.cure:
                changes.append(self.configured.cure)
        for one in self.findings:
            if not any(one.cure in known for known in changes):
                changes.append(f"{one.side}: {one.cure}")
        return tuple(changes)

    def as_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        of_verdicts = {
            name: {**asdict(verdict), "outcome": verdict.outcome.value}
            for name, verdict in (
                *(("configured", self.configured), ("stock", self.stock)),
                ("kvpatch", self.kvpatch),
            )
        }
        return {
            "serves": self.serves,
            "prefill": str(self.pair.prefill),
            "decode": str(self.pair.decode),
            "kvpatch_on_decode": self.pair.decode.has_kvpatch,
            **of_verdicts,
            "preflight": [asdict(found) for found in self.findings],
            "changes": list(self.changes),
            "assumed": list(self.assumed),
        }


def plan_pair(
    prefill: EngineArguments, decode: EngineArguments, config: Path | None = None
) -> Plan:
    """Plans two engines of these arguments.

    Args:
        config: their model's config.json, where it is not found by the model's name.

    Raises:
        BadOptions: the arguments are wrong, or do not say enough.
        CannotPlan: they ask for what is not planned for.
        ReleaseNotKnown: a release is not one of kvpatch's.
    """
    pair = Pair(engine_of("P", prefill, config), engine_of("D", decode, config))
    check_weights(prefill.options, decode.options)
    stock, kvpatch = verdicts(pair)
    plan = Plan(pair, stock, kvpatch, tuple(findings(pair)))
    if plan.configured.outcome is Outcome.UNKNOWN:
        raise CannotPlan(
            f"not planned for: {stock.reason}", f"{stock.cure}, or set {settings.ENABLE}=true on D"
        )
    return plan


def show(plan: Plan, console: Console) -> None:
    """Prints the verdicts, what to change, and what was assumed."""
    from rich.table import Table

    table = Table(title="kvpatch plan", show_header=False)
    table.add_row("P", str(plan.pair.prefill))
    table.add_row("D", str(plan.pair.decode))
    table.add_row("ENABLE_KVPATCH on D", "on" if plan.pair.decode.has_kvpatch else "off")
    for name, one in (("stock vLLM", plan.stock), ("kvpatch on D", plan.kvpatch)):
        reason = f": {one.reason}" if one.reason else ""
        way = f"\n({one.way})" if one is plan.kvpatch else ""
        style = _STYLES.get(one.outcome, "red")
        table.add_row(name, f"{one.outcome.value}{reason}{way}", style=style)
    console.print(table)
    if plan.findings:
        found = Table("preflight", "", "what")
        for row in plan.findings:
            style = "red" if row.level == "error" else "yellow"
            found.add_row(row.level, row.side, row.what, style=style)
        console.print(found)
    verdict = "serves as it is" if plan.serves else "does not serve as it is"
    style = "green" if plan.serves else "red"
    console.print(f"This pair {verdict}.", style=style, markup=False)
    for line in _lines(plan):
        console.print(line, markup=False, soft_wrap=True, highlight=False)


def _lines(plan: Plan) -> Iterator[str]:
    yield from (f"change: {line}" for line in plan.changes)
    yield from (f"taken for granted: {line}" for line in plan.assumed)
