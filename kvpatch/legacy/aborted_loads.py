"""The wrappers of ``aborted_loads``: what releases <= 0.15 make of aborted requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvpatch.core import seams
from kvpatch.core.ledger import Site, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.read_request import groups
from kvpatch.worker.state import engine_state, scheduler_state, schedulers_of

_LOADING = "WAITING_FOR_REMOTE_KVS"


class AbortedBlocks:
    """The requests of one scheduler that are over while their loads are not.

    <= 0.13 clients choose the names of requests, and one may come back under the name of
    one that it gave up. So the request is booked, not its name: its blocks are taken out of
    the release's tables, in which the next one has its own. Workers report by name: the next
    one's load is withheld from them until they have reported this one.
    """

    def __init__(self) -> None:
        #: Requests that are about to end while they are loaded, by name.
        self._ending: dict[str, Any] = {}
        #: (table of cache group, blocks) of those that are over.
        self._kept: dict[str, list[tuple[Any, list[Any]]]] = {}
        #: (connector's scheduler, its entry) of loads that wait for one of the same name.
        self._withheld: dict[str, tuple[Any, tuple[Any, Any]]] = {}

    @contextmanager
    def ending(self, core: Any, request_ids: Iterable[str]) -> Iterator[None]:
        """While inside, the requests end; books those that are being loaded."""
        for request_id in request_ids:
            request = core.requests.get(request_id)
            if request is None or not is_loading(request):
                continue
            if engine_state(core).facts.failed_loads != "unknown":  # else a later one of this name
                core.failed_recving_kv_req_ids.discard(request_id)  # would count as failed
            if request_id in self._withheld:
                # Nothing is written to its blocks. P is still to be told of it.
                scheduler, _ = self._withheld[request_id]
                self._withheld[request_id] = scheduler, (request, [])
            elif request_id in core.finished_recving_kv_req_ids:
                # Loaded and not yet scheduled. Another request of this name is not to be
                # taken for it.
                core.finished_recving_kv_req_ids.discard(request_id)
            else:
                self._ending[request_id] = request
        try:
            yield
        finally:
            self._ending.clear()

    def keep(self, core: Any, request: Any) -> bool:
        """Keeps the blocks of a request that ends, where they are still being written to."""
        request_id = request.request_id
        if self._ending.get(request_id) is not request:
            return False
        tables = core.kv_cache_manager.coordinator.single_type_managers
        taken = [(table, table.req_to_blocks.pop(request_id, [])) for table in tables]
        self._kept.setdefault(request_id, []).extend(taken)
        return True

    def withhold(self, scheduler: Any) -> None:
        """Takes back loads of a name whose last load is not over, before workers are told."""
        for request_id in self._kept.keys() & scheduler._reqs_need_recv.keys():
            entry = scheduler._reqs_need_recv[request_id]
            if any(groups(entry[1])):  # else there is nothing to load, and P is told
                self._withheld[request_id] = scheduler, entry
                del scheduler._reqs_need_recv[request_id]

    def end(self, core: Any, received: Collection[str]) -> None:
        """Frees the blocks of those that the workers have reported."""
        over = self._kept.keys() & received
        core.finished_recving_kv_req_ids -= over
        for request_id in over:
            for table, blocks in self._kept.pop(request_id):
                table.block_pool.free_blocks(reversed(blocks))  # as the release does
            withheld = self._withheld.pop(request_id, None)
            if withheld is not None:
                scheduler, entry = withheld
                scheduler._reqs_need_recv[request_id] = entry


def is_loading(request: Any) -> bool:
    """True if workers read the request's blocks from the engine that its parameters name."""
    parameters = request.kv_transfer_params or {}
    return request.status.name == _LOADING and parameters.get("remote_engine_id") is not None


def _finish_requests(
    wrapped: Wrapped, instance: Any, request_ids: str | Iterable[str], finished_status: Any
) -> Any:
    ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
    with engine_state(instance).of(AbortedBlocks).ending(instance, ids):
        return wrapped(ids, finished_status)


def _connector_finished(wrapped: Wrapped, instance: Any, request: Any) -> Any:
    answer = wrapped(request)
    aborts = engine_state(instance).of(AbortedBlocks)
    if not answer[0] and aborts.keep(instance, request):  # else another connector keeps them
        for scheduler in schedulers_of(instance):
            scheduler_state(scheduler).hold(aborts)
    return answer


def _build_connector_meta(wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any) -> Any:
    aborts = scheduler_state(instance).held(AbortedBlocks)
    if aborts is not None:
        aborts.withhold(instance)
    return wrapped(*args, **kwargs)


def _update_from_kv_xfer_finished(
    wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any
) -> Any:
    (output,) = (*args, *kwargs.values())  # whatever it is called
    result = wrapped(output)
    engine_state(instance).of(AbortedBlocks).end(instance, output.finished_recving or ())
    return result


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    return {
        seams.finish_requests(facts): _finish_requests,
        seams.connector_finished(facts): _connector_finished,
        seams.update_from_kv_xfer_finished(facts): _update_from_kv_xfer_finished,
        seams.build_connector_meta(facts): _build_connector_meta,
    }
