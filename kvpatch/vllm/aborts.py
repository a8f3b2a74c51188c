"""Requests that end while their blocks are still being written to.

A request that is aborted leaves its read going on: NIXL cannot be told to stop one without
a crash at either end. Its blocks must not be anybody else's before that is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

_LOADING = "WAITING_FOR_REMOTE_KVS"


class Aborts:
    """One scheduler's requests that are over while their loads are not."""

    def __init__(self) -> None:
        self._request_ids: set[str] = set()

    def begin(self, core: Any, request_ids: Iterable[str]) -> None:
        """Books those of the requests, which are about to end, that are being loaded."""
        for request_id in request_ids:
            request = core.requests.get(request_id)
            if request is None or not is_loading(request):
                continue
            if request_id in core.finished_recving_kv_req_ids:
                # Loaded and not yet scheduled. Another request of this name is not to be
                # taken for it.
                core.finished_recving_kv_req_ids.discard(request_id)
            else:
                self._request_ids.add(request_id)

    def has(self, request_id: str) -> bool:
        """Whether the request's blocks are still being written to."""
        return request_id in self._request_ids

    def end(self, core: Any, received: Collection[str]) -> None:
        """Frees the blocks of those that the workers have reported."""
        over = self._request_ids.intersection(received)
        self._request_ids -= over
        core.finished_recving_kv_req_ids -= over
        for request_id in over:
            request = core.requests.get(request_id)
            if request is not None:  # else freed with all others, as on a reset
                core._free_blocks(request)


def is_loading(request: Any) -> bool:
    """Whether workers read the request's blocks from the engine that its parameters name."""
    parameters = request.kv_transfer_params or {}
    return request.status.name == _LOADING and parameters.get("remote_engine_id") is not None


_ABORTS: WeakKeyDictionary[Any, Aborts] = WeakKeyDictionary()


def aborts_of(core: Any) -> Aborts:
    """The account of one of vLLM's schedulers."""
    return _ABORTS.setdefault(core, Aborts())


class Loads:
    """One worker's loads, where the release knows none that failed (to 0.11.0).

    A load that failed is not reported: it waits until its client gives it up. Then it is,
    so that the scheduler knows that nothing is written to its blocks any more.
    """

    def __init__(self) -> None:
        self._loading: set[str] = set()
        self._failed: set[str] = set()
        self._over: set[str] = set()

    def begin(self, request_ids: Iterable[str]) -> None:
        """Books what the scheduler asks for."""
        self._loading.update(request_ids)

    def fail(self, request_id: str) -> None:
        """Books that nothing more comes of one."""
        if request_id in self._loading:
            self._failed.add(request_id)

    def report(self, received: Collection[str], finished: Collection[str]) -> set[str]:
        """What to tell the scheduler of.

        Args:
            received: loads that are done.
            finished: requests that have ended, those that were aborted included.
        """
        self._over |= self._loading.intersection(finished)
        let_go = self._failed & self._over
        self._failed -= let_go
        told = let_go.union(received)
        self._loading -= told
        self._over -= told
        return told


_LOADS: WeakKeyDictionary[Any, Loads] = WeakKeyDictionary()


def loads_of(worker: Any) -> Loads:
    """The worker's own account."""
    return _LOADS.setdefault(worker, Loads())
