"""The probe, and what only this project's experiments ask of an engine's workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpatch.load.reader import Reader
from kvpatch.tools.verify.probe import CacheProbe, ProbedLayer, layer_caches

if TYPE_CHECKING:
    from kvpatch.worker.state import WorkerState


class LabProbe(CacheProbe):
    """Brought into every worker by ``--worker-extension-cls``."""

    def kvpatch_layout(self) -> list[dict[str, Any]]:
        """Shape, strides, place and planes of every layer's cache."""
        return [describe(layer) for layer in layer_caches(self)]

    def kvpatch_held(self) -> dict[str, int]:
        """Returns what kvpatch holds for requests in this process: all 0 once they are over.

        Blocks of host buffers are the scheduler's, which says so in its log.
        """
        readers = [state.held(Reader) for state in _states()]
        made = [reader.heterogeneous for reader in readers if reader]
        return {"staging_bytes": sum(reads.pool.taken_bytes for reads in made if reads)}


def _states() -> list[WorkerState]:
    """Returns the states of this process's connectors."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from kvpatch.worker.state import worker_state

    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    connectors = getattr(group, "_connectors", None) or (group,)
    workers = [getattr(connector, "connector_worker", None) for connector in connectors]
    return [worker_state(worker) for worker in workers if worker is not None]


def describe(layer: ProbedLayer) -> dict[str, Any]:
    """One layer's tensor and planes as plain data. Addresses and strides in bytes."""
    tensor = layer.tensor
    storage = tensor.untyped_storage()
    item_bytes = tensor.element_size()
    return {
        "layer": layer.name,
        "shape": list(tensor.shape),
        "strides_bytes": [stride * item_bytes for stride in tensor.stride()],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "address": tensor.data_ptr(),
        "storage_address": storage.data_ptr(),
        "block_tokens": layer.block_tokens,
        "planes": [
            {
                "content": plane.content.value,
                "address": plane.address,
                "counts": list(plane.counts),
                "strides_bytes": list(plane.strides_bytes),
                "item_bytes": plane.item_bytes,
            }
            for plane in layer.planes
        ],
    }
