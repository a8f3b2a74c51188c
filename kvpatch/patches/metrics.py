"""Shows in ``/metrics`` what kvpatch does with loads.

Why:
    An operator sees NIXL's transfers there, and neither by which way KV came, nor what was
    refused and why, nor how full the staging pool and the host buffer are.
Where:
    Workers count; the scheduler and the API server hand on and show.
How:
    Counts travel in the release's own statistics, as one more list beside its own, and become
    metrics where its NIXL metrics are made (`docs/reference/metrics.md` lists them). From 0.29 on a
    worker that has registered describes itself once, for `kvpatch plan`. A process
    without kvpatch passes them on, or shows nothing of them; what vLLM logs of its own statistics
    is what it was. A step adds some comparisons to it, about 3 microseconds over worker and
    scheduler, and takes no lock.
Upstream:
    None: the metrics are kvpatch's.
Limits:
    What P's scheduler knows of its host buffer is shown from 0.24 on, where the release asks
    schedulers by themselves. Without `failed_loads` loads that failed count as received <= 0.29.
    Engines of one front end that has no kvpatch need kvpatch on all of them or on none.
Remove when:
    kvpatch is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvpatch.core import seams
from kvpatch.core.errors import KvpatchError
from kvpatch.core.ledger import Patch, Site, Step, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.reader import Reader
from kvpatch.load.registration import registration_step
from kvpatch.observe import book as payload
from kvpatch.observe.book import Sample
from kvpatch.observe.catalogue import DESCRIPTION, METRICS, Metric
from kvpatch.transfer.own_read import Telemetry
from kvpatch.worker.engine_steps import Around, amend, around
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import engine_state, scheduler_state, worker_state

_LOG = logging.getLogger("kvpatch.metrics")

# --- a worker ---------------------------------------------------------------------


def _show_description(release: ReleaseWorker) -> None:
    from kvpatch.peer.engine_description import published

    try:
        found = published(release)
    except (ImportError, AttributeError, LookupError, TypeError, ValueError, KvpatchError):
        # Plans alone read it: an engine that cannot be described serves as any other.
        _LOG.debug("this engine does not describe itself", exc_info=True)
        return
    if found is not None:
        worker_state(release.worker).book.add(DESCRIPTION, 1, found)


def _record_transfer(wrapped: Wrapped, instance: Any, res: Any) -> Any:
    if isinstance(res, Telemetry) and res.is_of_nothing:
        return None  # a rank that was only told
    found = wrapped(res)
    if res is not None:  # from 0.32 on NIXL may not have counted
        payload.count_read(instance, res, res.way if isinstance(res, Telemetry) else "")
    return found


def _get_finished(wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any) -> Any:
    sent, received = wrapped(*args, **kwargs)
    if received:
        worker_state(instance).book.report(received)
    return sent, received


def _report_results(worker: Any, found: Any) -> None:
    if found.finished_recving:
        worker_state(worker).book.report(found.finished_recving, found.failed_recving)


def _handle_failed_transfer(wrapped: Wrapped, instance: Any, req_id: str, handle: Any) -> Any:
    worker_state(instance).book.fail(req_id)
    return wrapped(req_id, handle)


def _count(worker: Any) -> None:
    """Adds a worker's samples, before the release looks at its own counts."""
    state = worker_state(worker)
    reader = state.held(Reader)
    if reader is not None and reader.heterogeneous is not None:
        pool = reader.heterogeneous.pool
        pool.tell(state.book, str(worker.vllm_config.parallel_config.rank))
    samples = state.book.take()
    if samples:
        payload.put(worker.xfer_stats, samples)


def _name_ours(_: Any, stats: Any) -> None:
    if stats is not None:
        payload.put(stats, ())


# --- the release's statistics ---------------------------------------------------------


def _is_empty(stats: Any, is_empty: Any) -> Any:
    return is_empty and not payload.samples_of(stats.data)


def _aggregate(wrapped: Wrapped, instance: Any, other: Any) -> Any:
    # The release adds those of a name that both sides have.
    payload.put(instance, ())
    payload.put(other, ())
    return wrapped(other)


# --- the scheduler --------------------------------------------------------------------


def _add_schedulers(connector: Any, found: Any) -> Any:
    """Adds the samples of the scheduler's half to what the release has counted."""
    scheduler = connector.connector_scheduler
    if scheduler is None:
        return found
    state = scheduler_state(scheduler)
    if state.is_host_buffered:
        from kvpatch.host_buffer.scheduler import HostBufferScheduler

        buffer = state.held(HostBufferScheduler)
        if buffer is not None:
            buffer.tell()
    samples = state.book.take()
    if samples and found is None:
        found = type(connector).build_kv_connector_stats()
    if samples:
        payload.put(found, samples)
    return found


# --- the front end --------------------------------------------------------------------

#: Of a label; whatever an engine sends, no more are told apart.
_MOST_VALUES = 512
_OTHERS = "other"
_LAST_SAID = {"multiprocess_mode": "mostrecent"}  # of several API servers, as vLLM's gauges


class Shown:
    """kvpatch's metrics where the front end keeps vLLM's own of NIXL.

    They are made of the release's own classes, which are Prometheus' or stand for Ray's.

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


def _build_kv_connector_stats(wrapped: Wrapped, instance: Any, data: Any = None) -> Any:
    """Hides kvpatch's samples from the release's log: without counts of its own it logs nothing."""
    return wrapped(None if data is None else payload.without(data))


def _prom_init(
    wrapped: Wrapped,
    instance: Any,
    vllm_config: Any,
    metric_types: Any,
    labelnames: Any,
    per_engine_labelvalues: Any,
) -> None:
    wrapped(vllm_config, metric_types, labelnames, per_engine_labelvalues)
    shown = Shown(metric_types, labelnames, per_engine_labelvalues)
    engine_state(instance).hold(shown)


def _prom_observe(
    wrapped: Wrapped, instance: Any, transfer_stats_data: Any, engine_idx: int = 0
) -> Any:
    result = wrapped(transfer_stats_data, engine_idx)
    shown = engine_state(instance).held(Shown)
    if shown is not None:
        shown.observe(payload.samples_of(transfer_stats_data), engine_idx)
    return result


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    if facts.stats is None:
        return {}
    found: dict[Site, Wrapper | Step] = {
        seams.record_transfer(facts): _record_transfer,
        seams.worker_stats(facts): Step(around, Around(_count, _name_ours)),
        seams.stats_are_empty(facts): Step(amend, _is_empty),
        seams.aggregate_stats(facts): _aggregate,
        seams.build_connector_stats(facts): _build_kv_connector_stats,
        seams.prom_metrics_init(facts): _prom_init,
        seams.prom_metrics_observe(facts): _prom_observe,
    }
    if facts.server_arguments:  # others are not described
        found |= registration_step(facts, _show_description)
    if facts.failed_loads == "as failed":
        found[seams.transfer_results(facts)] = Step(around, Around(after=_report_results))
    else:  # what failed_loads has changed is behind a wrapper of its own
        found[seams.worker_get_finished(facts)] = _get_finished
    # There it leaves a request whose read broke off among those that were received.
    if facts.failed_loads == "as received" and not facts.forgets_failed_reads:
        found[seams.handle_failed_transfer(facts)] = _handle_failed_transfer
    if facts.asks_scheduler_for_stats:
        found[seams.connector_stats(facts)] = Step(amend, _add_schedulers)
    return found


PATCH = Patch(
    slug="metrics",
    wire_affecting=False,
    sites=_sites,
    not_needed="<= 0.11.0 vLLM has no metrics of the connector's to stand next to",
    document=__doc__,
)
