"""The probe, and what only this project's experiments ask of an engine's workers."""

from __future__ import annotations

from typing import Any

from kvpatch.tools.verify.probe import CacheProbe, ProbedLayer, layer_caches


class LabProbe(CacheProbe):
    """Brought into every worker by ``--worker-extension-cls``."""

    def kvpatch_layout(self) -> list[dict[str, Any]]:
        """Shape, strides, place and planes of every layer's cache."""
        return [describe(layer) for layer in layer_caches(self)]


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
