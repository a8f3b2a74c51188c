"""The dashboard's queries: held against the metrics, and run by a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from kvpatch.observe.catalogue import DESCRIPTION, METRICS, Metric
from kvpatch.tools.verify.engine import free_ports

from . import dashboard
from .dashboard import QUESTIONS, Question

pytestmark = pytest.mark.contract

_SELECTOR = re.compile(r"(kvpatch_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r'(\w+)!?="([^"]*)"')
_BY_NAME = {metric.shown_name: metric for metric in METRICS}
#: A query's own time here: two scrapes and more.
_WINDOW = "10s"
_SECONDS = 60.0


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
        assert re.search(name + r"\{[^}]*\$of\}", question.query), "of the engines that are chosen"


def test_each_metric_is_asked_for() -> None:
    asked = {name for question in QUESTIONS for name in _names(question)}
    assert asked == set(_BY_NAME) - {DESCRIPTION.shown_name}  # which plans read


def test_each_question_is_a_panel() -> None:
    made = json.loads(dashboard.dashboard())
    panels = made["panels"]
    assert [panel["title"] for panel in panels] == [question.asks for question in QUESTIONS]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in made["templating"]["list"]}
    assert variables == {"datasource", "instance"}


# --- a real Prometheus ----------------------------------------------------------------

_PROMETHEUS = shutil.which("prometheus")


class _Engine:
    """Metrics of the project's own code, of two engines of one API server, which go up."""

    def __init__(self) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, start_http_server

        from kvpatch.observe.prometheus import Shown

        self._registry = REGISTRY
        engines = {0: ["model", "0"], 1: ["model", "1"]}
        labels = ["model_name", "engine"]
        self._shown = Shown({Counter: Counter, Gauge: Gauge}, labels, engines)
        self.port = free_ports(1)
        self._server, self._thread = start_http_server(self.port, "127.0.0.1")

    def work(self) -> None:
        """Something of everything."""
        for metric in METRICS:
            for engine in (0, 1):
                for value in self._labels(metric):
                    self._shown.observe([[metric.name, value, 2.0]], engine)

    @staticmethod
    def _labels(metric: Metric) -> tuple[str, ...]:
        if metric.label == "rank":
            return ("0", "1")
        if metric.label == "layer":
            return ("layers.0", "layers.1")
        return metric.values or ("",)

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def _prometheus(target: int, directory: Path) -> Iterator[str]:
    assert _PROMETHEUS is not None
    scrape = {"job_name": "engines", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (directory / "prometheus.yml").write_text(json.dumps(config))  # which is YAML too
    address = f"127.0.0.1:{free_ports(1)}"
    with (directory / "log").open("w") as log:
        running = subprocess.Popen(
            [
                _PROMETHEUS,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"http://{address}"
        finally:
            running.terminate()
            running.wait(timeout=20)


def _answer(url: str, query: str) -> list[dict[str, Any]]:
    with urlopen(f"{url}/api/v1/query?{urlencode({'query': query})}", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def _is_ready(url: str) -> bool:
    """Whether it has scraped often enough to know how fast a counter grows."""
    try:
        return bool(_answer(url, f"rate(kvpatch_loads_total[{_WINDOW}]) > 0"))
    except URLError:
        return False


@pytest.mark.skipif(_PROMETHEUS is None, reason="no Prometheus is installed")
def test_prometheus_answers_each_query_of_the_dashboard(tmp_path: Path) -> None:
    panels = json.loads(dashboard.DASHBOARD.read_text())["panels"]
    engine = _Engine()
    try:
        with _prometheus(engine.port, tmp_path) as url:
            end = time.monotonic() + _SECONDS
            while not _is_ready(url):
                assert time.monotonic() < end, (tmp_path / "log").read_text()
                engine.work()
                time.sleep(0.25)
            for panel in panels:
                query = panel["targets"][0]["expr"]
                query = query.replace("$__rate_interval", _WINDOW).replace("$instance", ".*")
                answers = _answer(url, query)
                assert answers, query
                assert all(float(found["value"][1]) > 0 for found in answers), (query, answers)
    finally:
        engine.end()
