"""A load that failed is not reported as done where there are several cache groups.

Why:
    With the hybrid allocator the connector keeps no account of the blocks of a load
    that failed (a peer that died, a handshake that was refused) and reports the request
    as received: the model goes on over memory that nobody wrote.
Where:
    D's workers, where the model has several cache groups.
How:
    A request whose load failed is left out of what is reported as received, until the
    scheduler says that it is finished: it waits, with an error in the log, until its
    client gives it up, and its blocks are freed then. These releases know no way to
    fail one request of several groups.
Upstream:
    vLLM reports failed requests by themselves from 0.30 on.
Remove when:
    0.29 is no longer supported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from kvpatch._patching import Patch
from kvpatch._versions import GENERATIONS
from kvpatch.patches import _sites

_LOG = logging.getLogger("kvpatch.failed_loads")


class Failures:
    """The failed loads of one worker."""

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


class _Watched(set[str]):
    """The worker's own set of failed requests (to 0.22), which it clears."""

    def __init__(self, own: Iterable[str], failures: Failures) -> None:
        super().__init__(own)
        self._failures = failures

    def add(self, request_id: str) -> None:
        self._failures.add(request_id)
        super().add(request_id)


_FAILURES: WeakKeyDictionary[Any, Failures] = WeakKeyDictionary()


def failures_of(worker: Any) -> Failures:
    """The worker's own account."""
    return _FAILURES.setdefault(worker, Failures())


def _register_kv_caches(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    own = instance._failed_recv_reqs
    if instance._is_hma_required and isinstance(own, set):
        instance._failed_recv_reqs = _Watched(own, failures_of(instance))
    return wrapped(*args, **kwargs)


def _handle_failed_transfer(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def handle_failed(req_id: str, handle: Any) -> Any:
        if instance._is_hma_required:
            failures_of(instance).add(req_id)
        return wrapped(req_id, handle)

    return handle_failed(*args, **kwargs)


def _get_finished(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def get_finished(finished_req_ids: set[str]) -> Any:
        worker = instance.connector_worker
        if worker is None or not worker._is_hma_required:
            return wrapped(finished_req_ids)
        loading = set(worker._recving_metadata)
        sent, received = wrapped(finished_req_ids)
        return sent, failures_of(worker).sift(set(received or ()), finished_req_ids, loading)

    return get_finished(*args, **kwargs)


_NEED_IT = ("g0180", "g0200", "g0230", "g0240", "g0260", "g0290")
_BEFORE = GENERATIONS[: next(i for i, g in enumerate(GENERATIONS) if g.slug == _NEED_IT[0])]

PATCH = Patch(
    slug="failed_loads",
    wire_affecting=False,
    sites={
        g.slug: {
            _sites.register_kv_caches(g): _register_kv_caches,
            _sites.handle_failed_transfer(g): _handle_failed_transfer,
            _sites.get_finished(g): _get_finished,
        }
        for g in GENERATIONS
        if g.slug in _NEED_IT
    },
    not_needed={
        g.slug: "no model has several cache groups with the connector"
        if g in _BEFORE
        else "since 0.30 failed requests are reported as failed"
        for g in GENERATIONS
        if g.slug not in _NEED_IT
    },
    document=__doc__,
)
