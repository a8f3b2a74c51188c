"""The release's own way of counts from its workers to ``/metrics``, process for process."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from .engine_api import Told

_SHOWN = ("kvpatch_", "vllm:nixl_")
_LABELS = ("model_name", "engine")


def payload_of(workers: Sequence[Any], of_scheduler: Iterable[Any]) -> bytes | None:
    """What the engine sends of a step, encoded as it does; None where there is nothing.

    Args:
        of_scheduler: what the scheduler's half of the connector has told.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput

    told = pickle.loads(pickle.dumps([worker.get_kv_connector_stats() for worker in workers]))
    outputs = [
        SimpleNamespace(kv_connector_output=KVConnectorOutput(kv_connector_stats=of)) for of in told
    ]
    stats = KVOutputAggregator(len(workers)).aggregate(outputs).kv_connector_output
    stats = stats.kv_connector_stats
    for own in of_scheduler:
        if own is not None and not own.is_empty():
            stats = own if stats is None else stats.aggregate(own)
    if stats is None:
        return None
    sent = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    return msgspec.msgpack.encode(sent)


def told(config: Any, *payloads: bytes | None) -> Told:
    """What a new front end makes of what was sent in some steps."""
    front_end = _FrontEnd(config)
    for payload in payloads:
        if payload is not None:
            front_end.take(msgspec.msgpack.decode(payload))
    return Told(front_end.shown(), tuple(front_end.logged()))


class _FrontEnd:
    """What an API server has of the connector's: what it shows, and what it logs."""

    def __init__(self, config: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import metrics
        from vllm.v1.metrics import prometheus

        prometheus.unregister_vllm_metrics()
        _forget_ours()
        kind = getattr(metrics, "KVConnectorProm", None) or metrics.KVConnectorPrometheus
        self._prometheus = kind(config, list(_LABELS), {0: ["lab", "0"]})
        self._logging = metrics.KVConnectorLogging(config.kv_transfer_config)

    def take(self, payload: Any) -> None:
        self._logging.observe(payload)
        self._prometheus.observe(payload, 0)

    def logged(self) -> list[str]:
        """What it logs of the steps since the last time."""
        lines: list[str] = []
        self._logging.log(log_fn=lambda text, *values: lines.append(text % values))
        return lines

    def shown(self) -> dict[str, float]:
        """Its metrics, by name and by the value of a label of their own."""
        from prometheus_client import REGISTRY

        return {
            _named(sample.name, sample.labels): sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name.startswith(_SHOWN) and not sample.name.endswith("_created")
        }


def _forget_ours() -> None:
    """A front end without kvpatch in this process is to find nothing of one with it."""
    from prometheus_client import REGISTRY

    for collector in tuple(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("kvpatch_"):
            REGISTRY.unregister(collector)


def _named(name: str, labels: dict[str, str]) -> str:
    own = [value for label, value in labels.items() if label not in _LABELS]
    return " ".join((name, *own))
