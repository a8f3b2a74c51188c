"""The loads of one worker that failed, and when the scheduler may be told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from kvpatch.transfer.nixl import errors_of
from kvpatch.vllm.aborts import loads_of
from kvpatch.vllm.orders import groups

_LOG = logging.getLogger("kvpatch.failed_loads")


class Failures:
    """What is held back where the model has several cache groups."""

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._held_back: set[str] = set()
        self._over: set[str] = set()

    def add(self, request_id: str) -> None:
        """Books a failure; a background thread may."""
        self._failed.add(request_id)

    def sift(self, received: set[str], finished: Iterable[str], loading: Iterable[str]) -> set[str]:
        """What of `received` the scheduler may be told.

        Args:
            finished: requests that have ended, those that were aborted included.
            loading: requests whose load had not ended before.
        """
        over = set(finished)
        self._over |= over & set(loading)
        failed = received & self._failed
        self._failed -= failed
        for request_id in failed - self._over:
            _LOG.error(
                "the KV cache of request %s could not be loaded. This vLLM cannot fail one request "
                "of a model with several cache groups: it waits until its client gives it up. "
                "--disable-hybrid-kv-cache-manager, or vLLM 0.30 or later, fails it at once",
                request_id,
            )
        self._held_back |= failed - self._over
        let_go = self._held_back & over
        self._held_back -= let_go
        self._over -= received
        return (received - self._held_back) | let_go


_FAILURES: WeakKeyDictionary[Any, Failures] = WeakKeyDictionary()


def failures_of(worker: Any) -> Failures:
    """The worker's own account."""
    return _FAILURES.setdefault(worker, Failures())


class Unreported(set[str]):
    """Stands where a worker keeps its failed requests, and looks empty to the release.

    The release takes what it finds here for received, and looks up the engine that it
    was received from; a peer that was refused is not there.

    Args:
        own: what the worker had there.
        failures: is told of each too.
    """

    def __init__(self, own: Iterable[str], failures: Failures | None = None) -> None:
        super().__init__()
        self._failures = failures
        self._ids: set[str] = set()
        for request_id in own:
            self.add(request_id)

    def add(self, request_id: str) -> None:
        """Books a failure; a background thread may."""
        if self._failures is not None:
            self._failures.add(request_id)
        self._ids.add(request_id)

    def take(self, reading: Container[str]) -> set[str]:
        """Those of which no read goes on: with one that does, the release reports them."""
        found = {request_id for request_id in self._ids.copy() if request_id not in reading}
        self._ids -= found
        return found


def report_failed(worker: Any, unreported: Unreported) -> set[str]:
    """The failed requests that the scheduler waits for; their metadata is dropped.

    It does not wait for one without blocks (a full prefix hit, or an abort, of which P
    was to be told), and stumbles over its name.
    """
    failed = set()
    for request_id in unreported.take(worker._recving_transfers):
        metadata = worker._recving_metadata.pop(request_id, None)
        if metadata is None or any(groups(metadata.local_block_ids)):
            failed.add(request_id)
    return failed


def pop_one_by_one(
    worker: Any,
    pop_done: Callable[[dict[str, Any]], set[str]],
    transfers: dict[str, Any],
    also: tuple[type[Exception], ...],
    failed: Callable[[str], None],
) -> set[str]:
    """The requests whose transfers are done, as `pop_done` finds them.

    One that raises is not to take the others with it: they would be neither in
    `transfers` nor reported.

    Args:
        also: what `pop_done` raises beside NIXL's own errors.
        failed: is told of a request that raised; its transfers have been let go of.
    """
    errors = (*errors_of(worker.nixl_wrapper), *also)
    done: set[str] = set()
    for request_id, handles in list(transfers.items()):
        one = {request_id: handles}
        try:
            done |= pop_done(one)
        except errors:
            _LOG.exception("the read of request %s broke off", request_id)
            one.clear()
            _let_go(worker, handles)
            failed(request_id)
        if request_id in one:
            transfers[request_id] = one[request_id]
        else:
            del transfers[request_id]
    return done


def _let_go(worker: Any, handles: Iterable[Any]) -> None:
    for entry in handles:
        handle = entry[0] if isinstance(entry, tuple) else entry  # with a time to 0.12
        try:
            worker.nixl_wrapper.release_xfer_handle(handle)
        except errors_of(worker.nixl_wrapper) as error:
            _LOG.warning("a transfer that broke off could not be released: %s", error)


def leave_waiting(worker: Any, request_id: str, reason: object) -> None:
    """Books a failed load where the release can neither fail nor repeat it."""
    loads_of(worker).fail(request_id)
    _LOG.error(
        "the KV cache of request %s could not be loaded: %s. This vLLM cannot fail one request: "
        "it waits until its client gives it up. vLLM 0.11.1 or later fails it at once",
        request_id,
        reason,
    )
