"""docs/reference/metrics.md: every metric, as the code that shows it has it."""

from __future__ import annotations

from kvpatch.core.releases import FACTS
from kvpatch.observe.catalogue import HOST_BLOCKS, METRICS, Metric

from .dashboard import QUESTIONS
from .tables import ROOT, remade, rows_below

PAGE = ROOT / "docs" / "reference" / "metrics.md"


def page() -> str:
    """The whole document."""
    questions = [(question.asks, f"`{question.plain}`") for question in QUESTIONS]
    without = [facts.release for facts in FACTS.values() if facts.stats is None]
    return remade(
        PAGE,
        rows_below(("metric", "kind", "label", "meaning", "from"), list(map(_row, METRICS))),
        rows_below(("question", "query"), questions),
        (r"(`<= )[\d.]+(?=` have no metrics)", without[-1]),
        (r"(are shown from )[\d.]+(?= on)", _first(HOST_BLOCKS)),
    )


def _row(metric: Metric) -> tuple[str, ...]:
    values = ", ".join(f"`{value}`" for value in metric.values)
    label = f"`{metric.label}`" + (f": {values}" if values else "") if metric.label else ""
    if metric.label == "cause":
        label += ", ..."
    return (f"`{metric.shown_name}`", metric.kind, label, metric.meaning, _first(metric))


def _first(metric: Metric) -> str:
    """The first release that shows it."""
    return next(
        facts.release
        for facts in FACTS.values()
        if facts.stats is not None
        and (facts.asks_scheduler_for_stats or not metric.is_of_scheduler)
    )
