"""The handles of descriptors that the release has prepared: whose blocks they stand for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvpatch.core.proxies import replaced
from kvpatch.core.releases import ReleaseFacts
from kvpatch.worker.state import worker_state


def booked_ranks(worker: Any, engine_id: str, handle: Any) -> list[tuple[int, str]]:
    """Returns the ranks behind a handle that the release has booked, and their names to NIXL.

    Of a peer of more ranks <= 0.13, which has one handle, that is all that were met.
    """
    names = {
        place[-1] if isinstance(place, tuple) else place: name  # by pipeline stage too, from 0.27
        for place, name in tuple(worker._remote_agents.get(engine_id, {}).items())
    }
    handles = worker.dst_xfer_side_handles.get(engine_id)
    if isinstance(handles, Mapping):
        ranks = [int(rank) for rank, one in list(handles.items()) if one == handle]
    else:  # <= 0.13 it shakes hands with one
        ranks = list(names) if handles == handle else []
    return [(rank, names[rank]) for rank in ranks if rank in names]


class _NoHandles:
    """Stands for any list of handles; a transfer with one of these fails."""

    def __getitem__(self, rank: int) -> None:
        return None


_NO_HANDLES = _NoHandles()


class DividedBlockHandles(dict[Any, Any]):
    """The release's handles of its own blocks in parts, which it makes once for a ratio.

    It asks whether they are there before it makes them, every block of the cache once for each
    rank of the peer. They are said to be where that peer is read by us, whose plans need none.
    """

    def __init__(self, prepared: dict[Any, Any]) -> None:
        super().__init__(prepared)
        # Handshakes have threads of their own.
        self._this_thread = threading.local()

    def __contains__(self, key: object) -> bool:
        return getattr(self._this_thread, "makes_none", False) or super().__contains__(key)

    def __missing__(self, key: object) -> _NoHandles:
        return _NO_HANDLES

    def making_none(self) -> AbstractContextManager[None]:
        """Makes this thread find handles for all ratios, while inside."""
        return replaced(self._this_thread, makes_none=True)


def watch_divided_blocks(worker: Any, facts: ReleaseFacts) -> None:
    """Makes a worker's table a :class:`DividedBlockHandles`; a second call changes nothing."""
    if not facts.divides_own_blocks:
        return
    table = worker.src_xfer_handles_by_tp_ratio
    if not isinstance(table, DividedBlockHandles):
        table = worker.src_xfer_handles_by_tp_ratio = DividedBlockHandles(table)
    worker_state(worker).hold(table)


def blocks_undivided(worker: Any) -> AbstractContextManager[None]:
    """Keeps the release from dividing the worker's blocks for a peer, while inside."""
    table = worker_state(worker).held(DividedBlockHandles)
    return nullcontext() if table is None else table.making_none()
