"""D's own blocks in parts, one for each rank of a peer that has more: not of peers that we read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from kvpatch.core.releases import ReleaseFacts
from kvpatch.worker.state import worker_state


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

    @contextmanager
    def making_none(self) -> Iterator[None]:
        """While inside, this thread finds all ratios there."""
        self._this_thread.makes_none = True
        try:
            yield
        finally:
            self._this_thread.makes_none = False


def watch_divided_blocks(worker: Any, facts: ReleaseFacts) -> None:
    """Has a worker's table take part; registering again is no matter."""
    if not facts.divides_own_blocks:
        return
    table = worker.src_xfer_handles_by_tp_ratio
    if not isinstance(table, DividedBlockHandles):
        table = worker.src_xfer_handles_by_tp_ratio = DividedBlockHandles(table)
    worker_state(worker).hold(table)


@contextmanager
def blocks_undivided(worker: Any) -> Iterator[None]:
    """While inside, the release divides none of the worker's blocks for a peer."""
    table = worker_state(worker).held(DividedBlockHandles)
    with nullcontext() if table is None else table.making_none():
        yield
