"""Questions to the metrics: rows of docs/reference/metrics.md, and panels for Grafana."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .tables import ROOT

DASHBOARD = ROOT / "docs" / "reference" / "dashboard.json"

#: In a query: which engines, and over which time.
_OF = "$of"
_WINDOW = "$window"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2


@dataclass(frozen=True)
class Question:
    """One of them.

    Attributes:
        query: in Prometheus' language, with ``$of`` among the labels of each metric and
            ``$window`` for the time that it looks back.
        unit: of the answer, as Grafana calls it.
        legend: of each line, of its labels.
    """

    asks: str
    query: str
    unit: str
    legend: str = "{{instance}}"

    @property
    def plain(self) -> str:
        """The query of all engines, to be typed in."""
        plain = self.query.replace(f"{{{_OF}}}", "").replace(f", {_OF}", "")
        return plain.replace(_WINDOW, "5m")

    @property
    def in_grafana(self) -> str:
        """The query of the engines that the dashboard's reader has chosen."""
        chosen = self.query.replace(_OF, 'instance=~"$instance"')
        return chosen.replace(_WINDOW, "$__rate_interval")


QUESTIONS = (
    Question(
        "What becomes of loads?",
        "sum by (outcome) (rate(kvpatch_loads_total{$of}[$window]))",
        "reqps",
        "{{outcome}}",
    ),
    Question(
        "Of which share is it proven that P held the blocks?",
        'sum(rate(kvpatch_load_holds_total{hold="held", $of}[$window])) '
        "/ sum(rate(kvpatch_load_holds_total{$of}[$window]))",
        "percentunit",
        "proven",
    ),
    Question(
        "How many loads were stale, and how is it known?",
        'sum by (hold) (increase(kvpatch_load_holds_total{hold!="held", hold!="unproven", $of}'
        "[$window]))",
        "short",
        "{{hold}}",
    ),
    Question(
        "How many prompts of D are not P's?",
        "sum by (prompt) (increase(kvpatch_prompts_total{$of}[$window]))",
        "short",
        "{{prompt}}",
    ),
    Question(
        "What do P's digests say of loads?",
        "sum by (digest) (increase(kvpatch_load_digests_total{$of}[$window]))",
        "short",
        "{{digest}}",
    ),
    Question(
        "Which is the first layer with wrong bytes?",
        "sum by (layer) (increase(kvpatch_digest_alarms_total{$of}[$window]))",
        "short",
        "{{layer}}",
    ),
    Question(
        "What is refused?",
        "sum by (cause) (increase(kvpatch_refusals_total{$of}[$window]))",
        "short",
        "{{cause}}",
    ),
    Question(
        "Which share of reads is vLLM's own?",
        'sum(rate(kvpatch_reads_total{way="stock", $of}[$window])) '
        "/ sum(rate(kvpatch_reads_total{$of}[$window]))",
        "percentunit",
        "stock",
    ),
    Question(
        "How long does a read take, by way?",
        "sum by (way) (rate(kvpatch_read_seconds_total{$of}[$window])) "
        "/ sum by (way) (rate(kvpatch_reads_total{$of}[$window]))",
        "s",
        "{{way}}",
    ),
    Question(
        "How fast are bytes read, by way?",
        "sum by (way) (rate(kvpatch_read_bytes_total{$of}[$window]))",
        "Bps",
        "{{way}}",
    ),
    Question(
        "How full are the staging pools?",
        "kvpatch_staging_pool_used_bytes{$of} / kvpatch_staging_pool_bytes{$of}",
        "percentunit",
        "{{instance}} {{engine}} {{rank}}",
    ),
    Question(
        "How many reads wait for a staging pool?",
        "sum by (instance) (kvpatch_staging_pool_waiting_reads{$of})",
        "short",
    ),
    Question(
        "How many reads had to wait for one?",
        "sum by (instance) (rate(kvpatch_staging_pool_waits_total{$of}[$window]))",
        "ops",
    ),
    Question(
        "How full is P's host buffer?",
        'sum by (instance) (kvpatch_host_buffer_blocks{state="reserved", $of}) '
        '/ sum by (instance) (kvpatch_host_buffer_blocks{state="all", $of})',
        "percentunit",
    ),
    Question(
        "How many requests wait for it?",
        "sum by (instance) (kvpatch_host_buffer_waiting_requests{$of})",
        "short",
    ),
    Question(
        "Which share of its time does P spend on saving blocks?",
        "sum by (instance) (rate(kvpatch_host_buffer_save_seconds_total{$of}[$window]))",
        "percentunit",
    ),
    Question(
        "How many blocks does P save?",
        "sum by (instance) (rate(kvpatch_host_buffer_saved_blocks_total{$of}[$window]))",
        "ops",
    ),
)


def dashboard() -> str:
    """What Grafana imports."""
    made = {
        "title": "kvpatch",
        "uid": "kvpatch",
        "tags": ["vllm", "kvpatch"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_chosen_datasource(), _chosen_instances()]},
        "panels": [_panel(number, question) for number, question in enumerate(QUESTIONS)],
    }
    return json.dumps(made, indent=2) + "\n"


def _chosen_datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _chosen_instances() -> dict[str, Any]:
    query = "label_values(kvpatch_loads_total, instance)"
    return {
        "name": "instance",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "instance"},
        "definition": query,
        "refresh": 2,  # when the time changes
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, question: Question) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    place = {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
    target = {
        "refId": "A",
        "datasource": _DATASOURCE,
        "expr": question.in_grafana,
        "legendFormat": question.legend,
    }
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": question.asks,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": question.unit, "min": 0}, "overrides": []},
        "targets": [target],
    }
