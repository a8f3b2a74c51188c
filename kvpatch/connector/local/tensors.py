"""From the tensors that a worker registers to facts that geometry can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpatch.geometry import Memory, TensorFacts

if TYPE_CHECKING:
    import torch


def tensor_facts(tensor: torch.Tensor) -> TensorFacts:
    """Where a tensor lies and how it is strided; reads no element."""
    storage = tensor.untyped_storage()
    on_host = tensor.device.type == "cpu"
    return TensorFacts(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        item_bytes=tensor.element_size(),
        # torch counts host memory as device -1, NIXL as device 0.
        memory=Memory("DRAM" if on_host else "VRAM", max(tensor.get_device(), 0)),
        storage_address=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
    )
