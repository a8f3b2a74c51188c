"""The release's handles of its own blocks in parts, of which reads by kvpatch need none."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvpatch.core.proxies import replaced
from kvpatch.core.releases import ReleaseFacts
from kvpatch.worker.state import worker_state

#: Stands for any list of handles; a transfer with one of these fails.
_NO_HANDLES: defaultdict[int, None] = defaultdict(lambda: None)


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

    def __missing__(self, key: object) -> defaultdict[int, None]:
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
