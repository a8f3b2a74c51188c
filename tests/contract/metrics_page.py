"""docs/reference/metrics.md: every metric, as the code that shows it has it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvpatch.core.releases import FACTS
from kvpatch.observe.catalogue import HOST_BLOCKS, METRICS, Metric

from .tables import ROOT, remade, rows_below

PAGE = ROOT / "docs" / "reference" / "metrics.md"
DASHBOARD = ROOT / "docs" / "reference" / "dashboard.json"

#: In a query: the engines that the dashboard's reader has chosen.
CHOSEN = 'instance=~"$instance"'


@dataclass(frozen=True)
class Question:
    """One to the metrics: a panel of the dashboard, and a row of the page.

    Attributes:
        query: in Prometheus' language, as Grafana asks it.
        legend: of each line, of its labels.
    """

    asks: str
    query: str
    legend: str

    @property
    def plain(self) -> str:
        """The query of all engines, to be typed in."""
        plain = self.query.replace(f"{{{CHOSEN}}}", "").replace(f", {CHOSEN}", "")
        return plain.replace("$__rate_interval", "5m")


QUESTIONS = tuple(
    Question(panel["title"], panel["targets"][0]["expr"], panel["targets"][0]["legendFormat"])
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
)


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
