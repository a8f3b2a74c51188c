"""Host memory for a pool: what is free, and how it is got, pinned where that is possible."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.host_buffer")

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """What this process can still take, its container's limit included; None if unknown."""
    found = []
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    limit, current = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and current.is_file() and limit.read_text().strip() != "max":
        taken = int(current.read_text()) - _reclaimable_bytes(cgroup / "memory.stat")
        found.append(max(0, int(limit.read_text()) - taken))
    return min(found, default=None)


def _reclaimable_bytes(stat: Path) -> int:
    """Cached files, which count as taken and are given back when they must be."""
    if stat.is_file():
        for line in stat.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0


def host_bytes(size_bytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Zeroed host memory to copy to from a device, one-dimensional ``uint8``.

    Pinned as long as `owner` lives, where the device's framework can do that. Written to
    at once, so that memory that is not there is missed now and not in a request.
    """
    import torch

    if device.type == "cuda":
        # torch's own allocator of pinned memory takes the next power of two.
        memory = _huge(size_bytes)
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(memory.data_ptr(), size_bytes, 0)
        if int(error) == 0:
            # Kept until then: memory must not be freed while it is registered.
            weakref.finalize(owner, _unpin, memory)
        else:
            _LOG.warning("%d bytes of host buffer cannot be pinned: %s", size_bytes, error)
            forget_last_error(device)
        return memory
    if device.type != "cpu":
        try:
            return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _LOG.info("%s has no pinned memory: %s", device.type, error)
    return _huge(size_bytes)


def forget_last_error(device: torch.device) -> None:
    """Clears this thread's error of a CUDA call that torch has not checked.

    The runtime keeps it until somebody asks, and torch asks behind each launch of a kernel: the
    next one, whatever for, would raise it as its own.
    """
    import torch

    try:
        torch.empty(1, device=device).add_(1)
    except RuntimeError as error:  # cleared, as torch asked for it
        _LOG.debug("CUDA's last error was %s", error)


def _huge(size_bytes: int) -> torch.Tensor:
    """Zeroes, by numpy, which asks for huge pages: what is copied lies all over it."""
    import torch

    return torch.from_numpy(np.empty(size_bytes, dtype=np.uint8)).fill_(0)


def _unpin(memory: torch.Tensor) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
