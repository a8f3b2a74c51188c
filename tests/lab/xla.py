"""The device whose tensors have no storage: torch_xla's CPU, which is XLA as a TPU has it.

The lab's caches stay what they are in host memory, where contents are written and looked at;
the device holds a copy of its own, which is all that a connector is handed. What goes from one
to the other is whole tensors, as integers: XLA calls all NaNs one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class DeviceTensors:
    """The layers' tensors on the device; layers that share one go on doing so."""

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
        """Puts onto the device what host memory holds."""
        for host, there in self._pairs:
            kind = _INTEGERS[host.element_size()]
            there.view(kind).copy_(host.contiguous().view(kind).to(there.device))
        self._sync()

    def pull(self) -> None:
        """Puts into host memory what the device holds."""
        for host, there in self._pairs:
            host.copy_(there.cpu())
