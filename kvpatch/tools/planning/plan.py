"""The whole answer: what becomes of a pair, what it costs, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpatch.core import settings
from kvpatch.tools.planning.arguments import EngineArguments
from kvpatch.tools.planning.engine import engine_of
from kvpatch.tools.planning.factors import refuse_unseen
from kvpatch.tools.planning.known_names import check_weights
from kvpatch.tools.planning.numbers import Numbers, read_numbers, stock_numbers
from kvpatch.tools.planning.ours import Judged, judged_by_kvpatch
from kvpatch.tools.planning.pair import Outcome, Pair, Request, Verdict
from kvpatch.tools.planning.preflight import Finding, findings
from kvpatch.tools.planning.stock import stock_verdict


@dataclass(frozen=True)
class Plan:
    """What is told of a pair.

    Attributes:
        request: the prompt that numbers are of.
        stock: of the worst of several prompts.
        stock_new: of a prompt that D has nothing of.
        kvpatch: with kvpatch on D, and P stock.
        numbers: of the configured pair; None where nothing is read.
        changes: what to do, a sentence each; empty where the pair serves as it is.
    """

    pair: Pair
    request: Request
    stock: Verdict
    stock_new: Verdict
    kvpatch: Judged
    numbers: Numbers | None
    findings: tuple[Finding, ...]
    changes: tuple[str, ...]

    @property
    def configured(self) -> Verdict:
        """What becomes of the pair as its arguments have it."""
        return self.kvpatch.verdict if self.pair.decode.has_kvpatch else self.stock

    @property
    def serves(self) -> bool:
        """Whether the pair can be started as it is."""
        has_errors = any(found.level == "error" for found in self.findings)
        return self.configured.outcome is Outcome.IDENTICAL and not has_errors

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was taken for granted."""
        return (*self.pair.prefill.assumed, *self.pair.decode.assumed)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "serves": self.serves,
            "prefill": str(self.pair.prefill),
            "decode": str(self.pair.decode),
            "kvpatch_on_decode": self.pair.decode.has_kvpatch,
            "request": asdict(self.request),
            "configured": _as_dict(self.configured),
            "stock": _as_dict(self.stock),
            "stock_without_prefix_hits": _as_dict(self.stock_new),
            "kvpatch": {**_as_dict(self.kvpatch.verdict), "way": self.kvpatch.way},
            "per_request_and_worker": self._numbers(),
            "preflight": [asdict(found) for found in self.findings],
            "changes": list(self.changes),
            "assumed": list(self.assumed),
            "facts": {one.role: one.arguments.facts() for one in self.pair.sides},
        }

    def _numbers(self) -> dict[str, Any] | None:
        if self.numbers is None:
            return None
        return {**asdict(self.numbers), "way": self.numbers.way, "seconds_are": "an estimate"}


def plan_pair(
    prefill: EngineArguments,
    decode: EngineArguments,
    request: Request,
    *,
    config: Path | None = None,
    bytes_per_second: float | None = None,
) -> Plan:
    """What becomes of two engines of these arguments.

    Args:
        config: their model's config.json, where it is not found by the model's name.
        bytes_per_second: of the wire, where that is known.

    Raises:
        BadOptions: the arguments are wrong, or do not say enough.
        CannotPlan: they ask for what is not planned for.
        ReleaseNotKnown: a release is not one of kvpatch's.
    """
    pair = Pair(engine_of("P", prefill, config), engine_of("D", decode, config))
    check_weights(prefill.options, decode.options)
    refuse_unseen(pair)
    requests = pair.requests(request.tokens)
    stock = [stock_verdict(pair, one) for one in requests]
    worst = max(stock, key=lambda verdict: verdict.outcome.badness)
    judged = [judged_by_kvpatch(pair, one) for one in (request, *requests[1:])]
    ours = max(judged, key=lambda one: one.verdict.outcome.badness)
    found = tuple(findings(pair))
    return Plan(
        pair=pair,
        request=request,
        stock=worst,
        stock_new=stock[0],
        kvpatch=ours,
        numbers=_numbers(pair, ours, worst, request, bytes_per_second),
        findings=found,
        changes=tuple(_changes(pair, worst, ours.verdict, found)),
    )


def _numbers(
    pair: Pair,
    ours: Judged,
    stock: Verdict,
    request: Request,
    bytes_per_second: float | None,
) -> Numbers | None:
    """Of the pair with kvpatch on D, where that serves it; else of what vLLM reads."""
    if ours.verdict.outcome is Outcome.IDENTICAL and ours.mappings:
        return read_numbers(pair, ours.mappings, request, bytes_per_second)
    if Outcome.IDENTICAL in (ours.verdict.outcome, stock.outcome):
        return stock_numbers(pair, request, bytes_per_second)
    return None


def _changes(pair: Pair, stock: Verdict, ours: Verdict, found: Sequence[Finding]) -> list[str]:
    """What to do, the pair itself first."""
    changes = []
    configured = ours if pair.decode.has_kvpatch else stock
    if configured.outcome is not Outcome.IDENTICAL:
        if ours.outcome is Outcome.IDENTICAL:
            changes.append(f"D: set {settings.ENABLE}=true, with kvpatch installed beside vLLM")
            if stock.cure:
                changes.append(f"or, without kvpatch: {stock.cure}")
        elif configured.cure:
            changes.append(configured.cure)
    for one in found:
        change = f"{one.side}: {one.cure}"
        if not any(one.cure in known for known in changes):
            changes.append(change)
    return changes


def _as_dict(verdict: Verdict) -> dict[str, str]:
    return {"outcome": verdict.outcome.value, "reason": verdict.reason, "cure": verdict.cure}
