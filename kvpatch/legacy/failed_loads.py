"""The wrappers of ``failed_loads``: what releases <= 0.29 make of loads that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from queue import Empty, Queue
from typing import Any
from weakref import ref

from kvpatch.core import seams
from kvpatch.core.errors import KvpatchError
from kvpatch.core.ledger import Site, Step, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import one_line
from kvpatch.load.read_request import groups
from kvpatch.load.registration import registration_step
from kvpatch.peer.other_releases import Address, ask, question_for
from kvpatch.transfer.nixl import errors_of
from kvpatch.worker.kv_cache_groups import has_windows
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

_LOG = logging.getLogger("kvpatch.failed_loads")


#: The block that stands for those that slid out of a window; every request may have it.
_NULL_BLOCK = 0


# --- <= 0.11.0 one request cannot fail: it waits until its client gives it up ---------


class StuckLoads:
    """The loads of one worker, where the release knows none that failed (<= 0.11.0).

    A load that failed is not reported: it waits until its client gives it up. Then it is,
    so that the scheduler knows that nothing is written to its blocks any more.
    """

    def __init__(self) -> None:
        self._loading: set[str] = set()
        self._failed: set[str] = set()
        self._over: set[str] = set()
        #: What the step has brought: a request of one of these names that ended is another one.
        self._new: set[str] = set()

    def begin(self, request_ids: Iterable[str]) -> None:
        """Books what the scheduler asks for in a step."""
        self._new = set(request_ids)
        self._failed -= self._new
        self._over -= self._new
        self._loading |= self._new

    def fail(self, request_id: str) -> None:
        """Books that nothing more comes of one."""
        if request_id in self._loading:
            self._failed.add(request_id)

    def report(self, received: Collection[str], finished: Collection[str]) -> set[str]:
        """Returns what to tell the scheduler of.

        Args:
            received: loads that are done.
            finished: requests that ended before this step, those that were aborted included.
        """
        self._over |= self._loading.intersection(finished) - self._new
        self._new.clear()
        let_go = self._failed & self._over
        self._failed -= let_go
        told = let_go.union(received)
        self._loading -= told
        self._over -= told
        return told


def leave_waiting(loads: StuckLoads, request_id: str, reason: object) -> None:
    """Books a failed load where the release can neither fail nor repeat it."""
    loads.fail(request_id)
    _LOG.error(
        "the KV cache of request %s could not be loaded: %s. This vLLM cannot fail one request: "
        "it waits until its client gives it up. vLLM 0.11.1 or later fails it at once",
        one_line(request_id),
        one_line(reason),
    )


def _read_or_leave_waiting(wrapped: Wrapped, instance: Any, req_id: str, meta: Any) -> Any:
    loads, engine_id = worker_state(instance).of(StuckLoads), meta.remote_engine_id
    if engine_id not in instance._remote_agents:
        # The release goes on after a handshake whether it failed or not.
        leave_waiting(loads, req_id, f"the handshake with engine {engine_id} failed")
        return None
    errors: tuple[type[Exception], ...] = (
        KvpatchError,
        RuntimeError,  # no memory for the staging pool
        *errors_of(instance.nixl_wrapper),
    )
    try:
        return wrapped(req_id, meta)
    except errors as error:
        leave_waiting(loads, req_id, error)
        return None


def _start_load_kv(wrapped: Wrapped, instance: Any, metadata: Any) -> Any:
    entries = metadata.reqs_to_recv.items()
    # One without blocks only tells P, and nobody waits for it.
    loading = (req_id for req_id, entry in entries if entry.local_block_ids)
    worker_state(instance).of(StuckLoads).begin(loading)
    return wrapped(metadata)


def _get_finished_and_given_up(wrapped: Wrapped, instance: Any, finished_req_ids: set[str]) -> Any:
    sent, received = wrapped(finished_req_ids)
    loads = worker_state(instance.connector_worker).of(StuckLoads)
    return sent, loads.report(received or (), finished_req_ids)


def _handshake_with_the_living(
    wrapped: Wrapped,
    instance: Any,
    host: str,
    port: int,
    remote_tp_size: int,
    expected_engine_id: str,
) -> Any:
    ratio = instance._tp_size[instance.engine_id] // remote_tp_size
    if ratio > 0:  # of more ranks than ours the release makes an error, before it asks
        # On a socket of kvpatch's: the release waits for ever for a P that is silent.
        address = Address(host, int(port) + instance.tp_rank // ratio)
        ask(address, question_for("at a port", instance.tp_rank))
    return wrapped(host, port, remote_tp_size, expected_engine_id)


def _pop_done_or_leave_waiting(wrapped: Wrapped, instance: Any, transfers: dict[str, Any]) -> Any:
    state = worker_state(instance)

    def failed(req_id: str) -> None:
        if state.facts.keeps_load_metadata:
            instance._recving_metadata.pop(req_id, None)
        leave_waiting(state.of(StuckLoads), req_id, "its read broke off")

    return pop_one_by_one(instance, wrapped, transfers, failed)


# --- 0.11.1 to 0.29 failed requests are reported too early, or wrongly ----------------


class FailedRequests(set[str]):
    """Stands where a worker keeps its failed requests; a thread of a handshake may add to it.

    A set (0.11.1 to 0.21) looks empty to the release, which would report each as received and look
    up the engine that it came from: it does not know a peer that was refused. From a queue (0.22 to
    0.29) the release reports a request with the first of its transfers that fails: its blocks are
    used anew while others still write to them, and when these end, or fail too, the engine does,
    for it looks for what it has let go of. Here a request comes out when none of its transfers goes
    on. One without blocks (a full prefix hit, or an abort, of which P was to be told) does not: its
    scheduler does not wait for it, and stumbles over its name.

    Args:
        own: what the worker had there.
        failures: is told of each too.
    """

    def __init__(
        self, worker: Any, own: set[str] | Queue[str], failures: FailedGroupLoads | None = None
    ) -> None:
        super().__init__()
        self._worker = ref(worker)
        self._failures = failures
        self._ids: set[str] = set()
        self._is_queue = isinstance(own, Queue)
        for request_id in own.queue if isinstance(own, Queue) else own:
            self.add(request_id)

    def add(self, request_id: str) -> None:
        """Books a failure; a background thread may."""
        if self._failures is not None:
            self._failures.add(request_id)
        self._ids.add(request_id)

    put = add

    def empty(self) -> bool:
        """True if there is none to report."""
        return next(self._ready(), None) is None

    def get_nowait(self) -> str:
        """Raises:
        Empty: there is none to report.
        """
        request_id, worker = next(self._ready(), None), self._worker()
        if request_id is None or worker is None:
            raise Empty
        self._ids.discard(request_id)
        worker_state(worker).book.fail(request_id)
        return request_id

    def take(self) -> set[str]:
        """Takes out what is to be reported, and drops its metadata."""
        worker: Any = self._worker()
        found = set(self._ready())
        for request_id in found:
            worker_state(worker).book.fail(request_id)
            worker._recving_metadata.pop(request_id, None)
        self._ids -= found
        return found

    def _ready(self) -> Iterator[str]:
        """Yields those of which no read goes on, and forgets those that nobody waits for."""
        worker: Any = self._worker()
        for request_id in self._ids.copy() if worker is not None else ():
            if worker._recving_transfers.get(request_id):
                continue
            metadata = worker._recving_metadata.get(request_id)
            # A set's may have lost it; one of a queue was reported before.
            is_lost = metadata is None and not self._is_queue
            if is_lost or (metadata is not None and any(groups(metadata.local_block_ids))):
                yield request_id
                continue
            self._ids.discard(request_id)
            worker._recving_metadata.pop(request_id, None)


def watch_failed_loads(release: ReleaseWorker) -> None:
    """Makes a worker keep failed requests that the release reports too early, or wrongly."""
    worker = release.worker
    own = worker._failed_recv_reqs
    if not isinstance(own, FailedRequests):
        is_booked = isinstance(own, set) and has_several_groups(worker)
        failures = worker_state(worker).of(FailedGroupLoads) if is_booked else None
        worker._failed_recv_reqs = FailedRequests(worker, own, failures)


def _worker_get_finished(wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any) -> Any:
    sent, received = wrapped(*args, **kwargs)
    unreported = instance._failed_recv_reqs
    if isinstance(unreported, FailedRequests):
        received = set(received) | unreported.take()
    return sent, received


def pop_one_by_one(
    worker: Any,
    pop_done: Callable[[dict[str, Any]], set[str]],
    transfers: dict[str, Any],
    failed: Callable[[str], None],
) -> set[str]:
    """Returns the requests whose transfers are done, as `pop_done` finds them.

    One that raises is not to take the others with it: they would be neither in
    `transfers` nor reported.

    Args:
        failed: is told of a request that raised; its transfers have been let go of.
    """
    # Releases <= 0.11.0 make a RuntimeError of the state ERR.
    errors: tuple[type[Exception], ...] = (*errors_of(worker.nixl_wrapper), RuntimeError)
    done: set[str] = set()
    for request_id, handles in list(transfers.items()):
        one = {request_id: handles}
        try:
            done |= pop_done(one)
        except errors:
            _LOG.exception("the read of request %s broke off", one_line(request_id))
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
        handle = entry[0] if isinstance(entry, tuple) else entry  # with a time <= 0.12
        try:
            worker.nixl_wrapper.release_xfer_handle(handle)
        except errors_of(worker.nixl_wrapper) as error:
            _LOG.warning("a transfer that broke off could not be released: %s", error)


def _pop_done_or_failed(wrapped: Wrapped, instance: Any, transfers: dict[str, Any]) -> Any:
    def failed(req_id: str) -> None:
        metadata = instance._recving_metadata.get(req_id)
        if metadata is not None:
            instance._invalid_block_ids.update(metadata.local_block_ids)
        instance._failed_recv_reqs.add(req_id)

    done = pop_one_by_one(instance, wrapped, transfers, failed)
    # The release drops the metadata of those that failed, and calls them done.
    broken = {req_id for req_id in done if req_id not in instance._recving_metadata}
    for req_id in broken:
        instance._failed_recv_reqs.add(req_id)
    return done - broken


# --- 0.18 to 0.29 those of several cache groups are reported as received --------------


class FailedGroupLoads:
    """A worker's loads that failed, where the model has several cache groups.

    Those releases report them as received, and no block of theirs as invalid.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    def add(self, request_id: str) -> None:
        """Books a failure; a background thread may."""
        self._failed.add(request_id)

    def report(self, received: set[str], loading: Mapping[str, Any]) -> set[str]:
        """Returns what of `received` the scheduler may be told; `loading` has all loads' blocks."""
        failed = received & self._failed
        self._failed -= failed
        for request_id in failed:
            ids = {block for group in groups(loading[request_id]) for block in group}
            self._invalid |= ids - {_NULL_BLOCK}
            if not ids:  # P was to be told of it, and nobody waits
                received = received - {request_id}
        return received

    def take_invalid(self) -> set[int]:
        """The blocks of what was reported since this was asked last."""
        taken, self._invalid = self._invalid, set()
        return taken


def has_several_groups(worker: Any) -> bool:
    """True if a worker's layers have block tables by group, so that the release fails none."""
    return worker_state(worker).facts.has_cache_groups and bool(worker._is_hma_required)


def _handle_failed_transfer(wrapped: Wrapped, instance: Any, req_id: str, handle: Any) -> Any:
    if has_several_groups(instance):
        worker_state(instance).of(FailedGroupLoads).add(req_id)
    return wrapped(req_id, handle)


def _get_finished(wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any) -> Any:
    worker = instance.connector_worker
    if worker is None or not has_several_groups(worker):
        return wrapped(*args, **kwargs)
    loading = {
        name: metadata.local_block_ids for name, metadata in worker._recving_metadata.copy().items()
    }
    sent, received = wrapped(*args, **kwargs)
    return sent, worker_state(worker).of(FailedGroupLoads).report(set(received or ()), loading)


def _get_block_ids_with_load_errors(
    wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any
) -> Any:
    found = wrapped(*args, **kwargs)
    worker = instance.connector_worker
    if worker is None or not has_several_groups(worker):
        return found
    return set(found) | worker_state(worker).of(FailedGroupLoads).take_invalid()


def whole_requests(
    scheduler: Any, requests: Iterable[Any], invalid_block_ids: set[int]
) -> tuple[set[str], int, list[Any]]:
    """Returns which of these requests wait for blocks that failed in any group, and their tokens.

    Nothing of them counts as computed from here on: which of its tokens all groups have would
    depend on windows, and a load fails as a whole. Requests that do not wait come last.
    """
    failed: set[str] = set()
    others: list[Any] = []
    tokens = 0
    for request in requests:
        tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        if all(invalid_block_ids.isdisjoint(table) for table in tables):
            continue
        if request.status.name != "WAITING_FOR_REMOTE_KVS":
            others.append(request)
            continue
        failed.add(request.request_id)
        tokens += request.num_computed_tokens
        request.num_computed_tokens = request.num_external_computed_tokens = 0
    return failed, tokens, others


def _update_requests_with_invalid_blocks(
    wrapped: Wrapped,
    instance: Any,
    requests: Iterable[Any],
    invalid_block_ids: set[int],
    *more: Any,
    **named: Any,
) -> Any:
    plan = instance.kv_cache_config
    if len(plan.kv_cache_groups) == 1 and not has_windows(plan):
        return wrapped(requests, invalid_block_ids, *more, **named)
    failed, tokens, others = whole_requests(instance, requests, invalid_block_ids)
    if others:  # of another connector, that loads in step with the model
        return wrapped(others, invalid_block_ids, *more, **named)
    return failed, tokens, set()


# --- where each is needed -------------------------------------------------------------


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    found: dict[Site, Wrapper | Step] = {}
    if facts.failed_loads == "unknown":
        found[seams.start_load_kv(facts)] = _start_load_kv
        found[seams.get_finished(facts)] = _get_finished_and_given_up
        found[seams.read_blocks_for_req(facts)] = _read_or_leave_waiting
        found[seams.nixl_handshake(facts)] = _handshake_with_the_living
        found[seams.pop_done_transfers(facts)] = _pop_done_or_leave_waiting
    if facts.failed_loads in ("as received", "by the first"):
        found |= registration_step(facts, watch_failed_loads)
    if facts.failed_loads == "as received":
        found[seams.worker_get_finished(facts)] = _worker_get_finished
    if facts.forgets_failed_reads:  # and <= 0.11.2 NIXL's errors are not caught either
        found[seams.pop_done_transfers(facts)] = _pop_done_or_failed
    if facts.loses_failed_groups:
        found[seams.handle_failed_transfer(facts)] = _handle_failed_transfer
        found[seams.get_finished(facts)] = _get_finished
        found[seams.get_block_ids_with_load_errors(facts)] = _get_block_ids_with_load_errors
        found[seams.update_requests_with_invalid_blocks(facts)] = (
            _update_requests_with_invalid_blocks
        )
    return found
