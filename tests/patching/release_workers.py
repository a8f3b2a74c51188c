"""Workers of a release, as far as it takes one to read the caches that it registers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvpatch.core.releases import FACTS
from kvpatch.geometry.dimension_order import DimensionOrder
from kvpatch.worker.release_worker import KEYS_FIRST, ReleaseWorker


def worker_of(release: str, **attributes: Any) -> ReleaseWorker:
    """One with these attributes and, unless they have another, a configuration of no layers."""
    configuration = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    worker = SimpleNamespace(**{"vllm_config": configuration} | attributes)
    return ReleaseWorker(worker, FACTS[release])


@dataclass(frozen=True)
class _Given(ReleaseWorker):
    order: DimensionOrder = KEYS_FIRST
    layers: frozenset[str] | int = 0

    def orders(self, layer: str) -> tuple[DimensionOrder, ...]:
        return (self.order,)

    @property
    def expected_layers(self) -> frozenset[str] | int:
        return self.layers


def reading(order: DimensionOrder, layers: Any) -> ReleaseWorker:
    """One whose tensors have these dimensions; `layers` are their names, or how many."""
    expected = layers if isinstance(layers, int) else frozenset(layers)
    return _Given(worker_of("0.10.0").worker, FACTS["0.10.0"], order, expected)
