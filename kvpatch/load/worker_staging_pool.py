"""A worker's staging pool, of the size that the user chose, on the cache's own device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpatch.core import settings
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.transfer.staging_pool import StagingPool

if TYPE_CHECKING:
    import torch


def staging_pool(
    nixl: Any, memory: Memory, device: torch.device, *, copied_to: torch.device | None = None
) -> StagingPool:
    """The pool; it becomes memory, registered with NIXL, when the first read needs it.

    Args:
        copied_to: the cache's own device, where that copies from a pool in host memory.
    """

    def make(size_bytes: int) -> torch.Tensor:
        import torch

        pinned = (
            copied_to is not None and copied_to.type != "cpu" and torch.accelerator.is_available()
        )
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        if device.type != "cpu":
            # Whoever had this memory before may have work in the queue; NIXL waits for nobody.
            torch.get_device_module(device).synchronize(device)
        place = (buffer.data_ptr(), size_bytes, memory.device_id, "")
        nixl.register_memory(nixl.get_reg_descs([place], memory.kind))
        return buffer

    on_device = device.type != "cpu" or (copied_to is not None and copied_to.type != "cpu")
    return StagingPool(settings.staging_bytes(), make, on_device)
