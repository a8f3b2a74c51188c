"""The dashboard's queries, held against the metrics."""

from __future__ import annotations

import json
import re

import pytest

from kvpatch.observe.catalogue import DESCRIPTION, METRICS

from .metrics_page import CHOSEN, DASHBOARD, QUESTIONS, Question

pytestmark = pytest.mark.contract

_SELECTOR = re.compile(r"(kvpatch_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r'(\w+)!?="([^"]*)"')
_BY_NAME = {metric.shown_name: metric for metric in METRICS}


def _names(question: Question) -> list[str]:
    return [name for name, _ in _SELECTOR.findall(question.plain)]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.asks)
def test_a_query_asks_for_what_is_shown(question: Question) -> None:
    """A wrong name or label is no error to Prometheus: its answer is empty."""
    asked = _SELECTOR.findall(question.plain)
    assert asked
    for name, labels in asked:
        metric = _BY_NAME[name]
        for label, value in _LABEL.findall(labels):
            assert label == metric.label, question.plain
            assert value in metric.values, question.plain
    grouped = re.findall(r"by \(([^)]*)\)", question.query)
    known = {"instance", "engine", *(_BY_NAME[name].label for name, _ in asked)}
    assert {label for group in grouped for label in group.split(", ")} <= known
    assert set(re.findall(r"\{\{(\w+)\}\}", question.legend)) <= known


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.asks)
def test_counters_are_asked_for_by_their_growth(question: Question) -> None:
    grown = re.findall(r"(?:rate|increase)\((kvpatch_\w+)", question.plain)
    counters = [name for name in _names(question) if _BY_NAME[name].kind == "counter"]
    assert grown == counters
    for name, _ in _SELECTOR.findall(question.query):
        assert re.search(f"{name}{{[^}}]*{re.escape(CHOSEN)}}}", question.query), question.query


def test_each_metric_is_asked_for() -> None:
    asked = {name for question in QUESTIONS for name in _names(question)}
    assert asked == set(_BY_NAME) - {DESCRIPTION.shown_name}  # which plans read


def test_panels_do_not_overlap_and_their_variables_are_there() -> None:
    made = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in made["panels"]}) == len(places)
    variables = {variable["name"] for variable in made["templating"]["list"]}
    assert variables == {"datasource", "instance"}
