"""Allocations of a cache as bytes; all of them as one range, so that one copy can reach several.

What lies between several is never touched, and may not even be mapped.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


_LOG = logging.getLogger("kvpatch.staging")


class Bytes(NamedTuple):
    """A range of memory.

    Attributes:
        address: of its first byte.
        memory: ``uint8``, one-dimensional.
    """

    address: int
    memory: torch.Tensor


def storage_of(tensor: torch.Tensor) -> Bytes:
    """Returns all of a tensor's own allocation."""
    import torch

    storage = tensor.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return Bytes(storage.data_ptr(), view.set_(storage, 0, (storage.nbytes(),), (1,)))


def one_memory(tensors: Iterable[torch.Tensor]) -> Bytes | None:
    """The range from the first byte of their storages to the last; None where a device has none.

    Args:
        tensors: of one device; they outlive what is returned, which keeps none alive.
    """
    storages = [(tensor.device, tensor.untyped_storage()) for tensor in tensors]
    device = storages[0][0]
    start = min(storage.data_ptr() for _, storage in storages)
    size_bytes = max(storage.data_ptr() + storage.nbytes() for _, storage in storages) - start
    if device.type not in ("cpu", "cuda"):  # ROCm's devices are the latter too
        return None
    try:
        memory = memory_at(start, size_bytes, device)
    except (RuntimeError, TypeError, ValueError):
        _LOG.debug("each layer is placed by itself: torch takes no range of memory", exc_info=True)
        return None
    is_same = memory.device == device and memory.data_ptr() == start
    return Bytes(start, memory) if is_same else None


def memory_at(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns memory as ``uint8``; it must outlive the tensor.

    Raises:
        RuntimeError, TypeError, ValueError: torch takes no such memory.
    """
    import torch

    if device.type == "cpu":
        raw = (ctypes.c_uint8 * size_bytes).from_address(address)
        return torch.frombuffer(raw, dtype=torch.uint8)
    # On the device where it is, or torch would look for a default one, and copy it there.
    found: torch.Tensor = torch.as_tensor(_Range(address, size_bytes), device=device)
    return found


class _Range:
    """A device's memory as torch takes it from other libraries, without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def streams_of(device: torch.device) -> Any:
    """Returns the module of a device's streams; None where copies end at once."""
    import torch

    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "Stream") and hasattr(module, "Event") else None
