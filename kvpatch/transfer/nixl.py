"""NIXL transfers between two sets of byte runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpatch.core.errors import KvpatchError, NothingToRead
from kvpatch.geometry.plane import Memory
from kvpatch.geometry.segments import Int64Array

_LOG = logging.getLogger("kvpatch.unlike_engines")

_MASK_BYTES = 7


class Ends(NamedTuple):
    """Both ends of a read; ``agent`` is the remote one's name to NIXL, a rank of ``engine``."""

    local: Memory
    remote: Memory
    agent: str
    engine: str = ""


def prepare_read(
    nixl: Any,
    ends: Ends,
    remote_address: Int64Array,
    local_address: Int64Array,
    length: Int64Array,
) -> Any:
    """Prepares one READ of all runs, whatever their number; the caller starts it.

    Args:
        nixl: an agent of NIXL's Python API.

    Raises:
        NothingToRead: there are no runs.
    """
    if not length.size:
        raise NothingToRead(f"a read from {ends.agent} with no bytes in it")
    ours = nixl.get_xfer_descs(_descriptors(local_address, length, ends.local), ends.local.kind)
    theirs = nixl.get_xfer_descs(
        _descriptors(remote_address, length, ends.remote), ends.remote.kind
    )
    return nixl.initialize_xfer("READ", ours, theirs, ends.agent, b"")


def tell_over(nixl: Any, agents: Iterable[str], notification: bytes) -> None:
    """Tells each agent that a request is over; one that cannot be told frees its blocks in time.

    Where the release tells them itself, the notification is empty, and this says nothing.
    """
    if not notification:
        return
    errors: tuple[type[Exception], ...] = (RuntimeError, *errors_of(nixl))
    for agent in agents:
        try:
            nixl.send_notif(agent, notif_msg=notification)
        except errors as error:
            _LOG.warning("%s was not told that a request is over: %s", agent, error)


#: What a read raises beside NIXL's errors: a chunk that cannot be, no memory for the pool, a copy
#: that cannot be, an address that is none.
READ_ERRORS: tuple[type[Exception], ...] = (
    *(KvpatchError, RuntimeError, MemoryError, ValueError, IndexError, OverflowError),
)


def errors_of(nixl: Any) -> tuple[type[Exception], ...]:
    """Returns the errors that an agent's transfers can raise: NIXL's have no class in common."""
    return _errors_of(nixl.__class__)


@lru_cache(maxsize=8)
def _errors_of(kind: type) -> tuple[type[Exception], ...]:
    # The class may be a subclass of NIXL's, from another module.
    modules = (sys.modules.get(owner.__module__) for owner in kind.__mro__)
    found_bindings = (vars(m)["nixlBind"] for m in modules if m and "nixlBind" in vars(m))
    bindings = next(found_bindings, None)
    found = (value for value in vars(bindings).values()) if bindings is not None else ()
    return tuple(e for e in found if isinstance(e, type) and issubclass(e, Exception))


def _descriptors(
    addresses: Int64Array, length: Int64Array, memory: Memory
) -> npt.NDArray[np.uint64]:
    """[run, (address, bytes, device)], as NIXL takes arrays."""
    found = np.empty((length.size, 3), dtype=np.uint64)
    found[:, 0] = addresses
    found[:, 1] = length
    found[:, 2] = memory.device_id
    return found


def mask_of(agent_metadata: bytes) -> int:
    """Returns what hides addresses of a worker's memory from those who see P's answers.

    Only peers that have shaken hands know it.

    Args:
        agent_metadata: of the worker's NIXL agent, as its handshake states it.
    """
    return int.from_bytes(sha256(agent_metadata).digest()[:_MASK_BYTES], "big")
