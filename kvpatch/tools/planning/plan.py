"""The whole answer: the verdicts on a pair, what to change, and how it is printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions
from kvpatch.tools.planning.arguments import EngineArguments
from kvpatch.tools.planning.engine import engine_of
from kvpatch.tools.planning.pair import Outcome, Pair, Verdict
from kvpatch.tools.planning.preflight import Finding, findings
from kvpatch.tools.planning.verdicts import verdicts

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    Outcome.IDENTICAL: "green",
    Outcome.WRONG: "bold red",
    Outcome.UNKNOWN: "yellow",
}


@dataclass(frozen=True)
class PairPlan:
    """A pair, the verdicts on stock engines and with kvpatch on D, and what else is found."""

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
        of_all = {"configured": self.configured, "stock": self.stock, "kvpatch": self.kvpatch}
        return {
            "serves": self.serves,
            "prefill": str(self.pair.prefill),
            "decode": str(self.pair.decode),
            "kvpatch_on_decode": self.pair.decode.has_kvpatch,
            **{name: asdict(one) | {"outcome": one.outcome.value} for name, one in of_all.items()},
            "preflight": [asdict(found) for found in self.findings],
            "changes": list(self.changes),
            "assumed": list(self.assumed),
        }


def plan_pair(
    prefill: EngineArguments, decode: EngineArguments, config: Path | None = None
) -> PairPlan:
    """Plans two engines; raises what :func:`engine_of` and :func:`verdicts` do."""
    pair = Pair(engine_of("P", prefill, config), engine_of("D", decode, config))
    stock, kvpatch = verdicts(pair)
    plan = PairPlan(pair, stock, kvpatch, tuple(findings(pair)))
    if plan.configured.outcome is Outcome.UNKNOWN:
        cure = f"{stock.cure}, or set {settings.ENABLE}=true on D"
        raise BadOptions(f"not planned for: {stock.reason}", cure)
    return plan


def show(plan: PairPlan, console: Console) -> None:
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
    console.print(f"This pair {verdict}.", style="green" if plan.serves else "red", markup=False)
    lines = [f"change: {line}" for line in plan.changes]
    for line in (*lines, *(f"taken for granted: {line}" for line in plan.assumed)):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
