"""Caches in memory that the lab does not look into: a GPU's, where there is one, or torch_xla's.

The lab's caches stay what they are in host memory, where contents are written and looked at. The
device holds a copy of each of their allocations, and the connector is handed tensors that lie in
these as they do here. What goes from one to the other is whole allocations.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

#: The variable that asks for it: :data:`GPU`, or :data:`COPY`; caches are the lab's own without it.
MEMORY = "LAB_MEMORY"
GPU = "cuda"
#: Other host memory, which shows without a GPU that all that must be copied is.
COPY = "copy"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def asked() -> str:
    """Which memory caches lie in; empty for the lab's own."""
    return os.environ.get(MEMORY, "")


def variables() -> dict[str, str]:
    """What a lab's processes see of GPUs, and UCX's transports."""
    if asked() != GPU:
        return {"CUDA_VISIBLE_DEVICES": "", "UCX_TLS": "self,sm,tcp"}
    # A process that is forked can use CUDA if the one before has never asked CUDA for devices.
    return {"UCX_TLS": "self,sm,tcp,cuda", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class TensorsElsewhere:
    """The layers' tensors; those that share an allocation go on doing so."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if asked() == GPU:
            from kvpatch.transfer import kernel_thread

            kernel_thread.patience_seconds = 60.0  # it is the kernels' bytes that are compared
        device = torch.device("cuda", 0) if asked() == GPU else torch.device("cpu")
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()}
        self._pairs = {
            address: (whole := _bytes_of(storage), torch.empty_like(whole, device=device))
            for address, storage in storages.items()
        }
        self.tensors = {name: self._there(tensor) for name, tensor in tensors.items()}
        self.push()

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        _, memory = self._pairs[tensor.untyped_storage().data_ptr()]
        found = torch.empty(0, dtype=tensor.dtype, device=memory.device)
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return found.set_(memory.untyped_storage(), *place)

    def push(self) -> None:
        for host, there in self._pairs.values():
            there.copy_(host)
        self._wait()

    def pull(self) -> None:
        self._wait()
        for host, there in self._pairs.values():
            host.copy_(there)

    @staticmethod
    def _wait() -> None:
        if asked() == GPU:
            torch.cuda.synchronize()


class DeviceTensors:
    """The layers' tensors on torch_xla's CPU: XLA as a TPU has it, whose tensors have no storage.

    Layers that share one go on doing so. Whole tensors go from one to the other, as integers: XLA
    calls all NaNs one.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        import torch_xla  # type: ignore[import-not-found]

        distinct = {id(tensor): tensor for tensor in tensors.values()}
        device = torch_xla.device()
        made = {key: tensor.to(device) for key, tensor in distinct.items()}
        self._pairs = [(tensor, made[key]) for key, tensor in distinct.items()]
        self.tensors = {name: made[id(tensor)] for name, tensor in tensors.items()}
        self._sync = torch_xla.sync
        self.push()

    def push(self) -> None:
        for host, there in self._pairs:
            kind = _INTEGERS[host.element_size()]
            there.view(kind).copy_(host.contiguous().view(kind).to(there.device))
        self._sync()

    def pull(self) -> None:
        for host, there in self._pairs:
            host.copy_(there.cpu())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
