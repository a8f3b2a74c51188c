"""Turns a plan into one NIXL transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpatch._errors import KvpatchError
from kvpatch.geometry import Memory, Plan


class NothingToRead(KvpatchError):
    """A read of no bytes, which NIXL has no transfer for."""


def post_read(
    nixl: Any, plan: Plan, local: Memory, remote: Memory, agent: str, notification: bytes
) -> Any:
    """Prepares the READ of all of a plan's runs; the caller starts it.

    One transfer, whatever the number of runs: the peer is notified once, after
    the last byte.

    Args:
        nixl: an agent of NIXL's Python API.
        agent: the remote agent's name, as ``add_remote_agent`` returned it.

    Raises:
        NothingToRead: the plan has no runs.
    """
    if not len(plan):
        raise NothingToRead(f"a read from {agent} with no bytes in it")
    ours = nixl.get_xfer_descs(_descriptors(plan.local_address, plan, local), local.kind)
    theirs = nixl.get_xfer_descs(_descriptors(plan.remote_address, plan, remote), remote.kind)
    return nixl.initialize_xfer("READ", ours, theirs, agent, notification)


def _descriptors(
    addresses: npt.NDArray[np.int64], plan: Plan, memory: Memory
) -> npt.NDArray[np.uint64]:
    """[run, (address, bytes, device)], as NIXL takes arrays."""
    found = np.empty((len(plan), 3), dtype=np.uint64)
    found[:, 0] = addresses
    found[:, 1] = plan.length
    found[:, 2] = memory.device_id
    return found
