"""Questions to the metrics: panels of docs/reference/dashboard.json, and rows of metrics.md."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .tables import ROOT

DASHBOARD = ROOT / "docs" / "reference" / "dashboard.json"

#: In a query: the engines that the dashboard's reader has chosen.
CHOSEN = 'instance=~"$instance"'


@dataclass(frozen=True)
class Question:
    """One of them.

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
