"""The table of holds of a worker, and what becomes of its words in the worker's steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from kvpatch.checks.holds.hold_check import HoldChecks
from kvpatch.checks.holds.hold_table import HoldTable
from kvpatch.load.prepared_transfers import CheckMakers
from kvpatch.transfer.nixl import errors_of
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

_LOG = logging.getLogger("kvpatch.stale_blocks")

#: NIXL's back ends that are known to read a host's memory whatever the cache lies in.
_BACKENDS = frozenset(("UCX",))


def make_table(release: ReleaseWorker) -> None:
    """Makes a worker's table before it states what its agent has; of one start there is one."""
    worker, backends = release.worker, release.nixl_backends
    state = worker_state(worker)
    if not release.pulls or state.held(HoldTable) is not None:
        return
    if not backends or not _BACKENDS.issuperset(backends):
        named = ", ".join(backends) or "no NIXL back end named"
        _LOG.info("blocks gone stale are not looked for with %s", named)
        return
    errors: tuple[type[Exception], ...] = RuntimeError, MemoryError
    errors += errors_of(worker.nixl_wrapper)
    try:
        table = HoldTable(worker.nixl_wrapper)
    except errors as error:
        _LOG.warning("blocks gone stale are not looked for: no host memory for it: %s", error)
        return
    state.hold(table)
    state.of(CheckMakers)["stale_blocks"] = lambda *_: HoldChecks(table)


def hear(table: HoldTable, changes: Mapping[str, int]) -> None:
    """Writes down what the scheduler has granted and withdrawn."""
    for request_id, generation in changes.items():
        if generation:
            table.hold(request_id, generation)
        else:
            table.end(request_id)


def end_everything(worker: Any) -> None:
    """Takes all words out: what the blocks hold is about to be lost."""
    table = worker_state(worker).held(HoldTable)
    if table is not None:
        table.end_all()


def end_all(worker: Any, request_ids: Iterable[str]) -> None:
    """Takes out the words of requests whose blocks the scheduler is about to give away."""
    table = worker_state(worker).held(HoldTable)
    if table is not None:
        for request_id in request_ids:
            table.end(request_id)
