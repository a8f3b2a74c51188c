"""kvpatch's metrics where the front end keeps vLLM's own of NIXL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvpatch.observe.book import Sample
from kvpatch.observe.catalogue import METRICS, Metric

#: Of a label; whatever an engine sends, no more are told apart.
_MOST_VALUES = 512
_OTHERS = "other"
_LAST_SAID = {"multiprocess_mode": "mostrecent"}  # of several API servers, as vLLM's gauges


class Shown:
    """Made of the release's own classes, which are Prometheus' or stand for Ray's.

    Args:
        kinds: by Prometheus' classes, what stands for them.
        labels: of vLLM's metrics.
        engines: the values of these, by the number of an engine.
    """

    def __init__(
        self,
        kinds: Mapping[Any, Any],
        labels: Sequence[str],
        engines: Mapping[int, Sequence[object]],
    ) -> None:
        from prometheus_client import Counter, Gauge

        _forget_earlier()
        self._engines = engines
        #: By metric, the labels that were shown.
        self._seen: dict[str, set[str]] = {}
        self._metrics = {
            metric.name: kinds[Counter if metric.kind == "counter" else Gauge](
                name=metric.name,
                documentation=metric.meaning,
                labelnames=[*labels, metric.label] if metric.label else list(labels),
                **({} if metric.kind == "counter" else _LAST_SAID),
            )
            for metric in METRICS
        }
        for metric in METRICS:  # nothing is counted yet
            for engine in engines.values() if metric.kind == "counter" else ():
                for value in metric.values if metric.label else ("",):
                    self._child(metric.name, engine, value)

    def _child(self, name: str, engine: Sequence[object], label: str) -> Any:
        """Returns a metric with its labels.

        It asks for them each time: in Ray's metrics (<= 0.12) the labels asked for last count.
        """
        seen = self._seen.setdefault(name, set())
        if label not in seen and len(seen) >= _MOST_VALUES:
            label = _OTHERS
        seen.add(label)
        return self._metrics[name].labels(*engine, *((label,) if label else ()))

    def observe(self, samples: Iterable[Sequence[Any]], engine_index: int) -> None:
        """Shows what an engine has told. What this process's kvpatch does not know is left out.

        An engine of another kvpatch may send anything, and an error here would end the front end's
        answers to everybody.
        """
        engine = self._engines.get(engine_index)
        if engine is None:
            return
        for sample in samples:
            metric = _BY_NAME.get(sample[0]) if len(sample) == len(Sample._fields) else None
            if metric is None or not _fits(metric, *sample[1:]):
                continue
            name, label, value = sample
            child = self._child(name, engine, label)
            if metric.kind == "counter":
                child.inc(value)
            else:
                child.set(value)


_BY_NAME = {metric.name: metric for metric in METRICS}


def _fits(metric: Metric, label: Any, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and (metric.kind == "gauge" or value >= 0)
    return is_number and bool(label) == bool(metric.label)


def _forget_earlier() -> None:
    """Takes out what an engine of this process has shown before, as vLLM does with its own."""
    from prometheus_client import REGISTRY

    # Prometheus' client has no other way to ask for them; vLLM goes through the same table.
    for collector in tuple(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "") in _BY_NAME:
            REGISTRY.unregister(collector)
