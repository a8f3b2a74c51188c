"""The wrappers of ``failed_loads``: what releases <= 0.29 make of loads that fail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from kvpatch.core import seams
from kvpatch.core.errors import KvpatchError
from kvpatch.core.ledger import Site, Step, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.legacy.failed_requests import (
    FailedGroupLoads,
    FailedRequestSet,
    StuckLoads,
    has_several_groups,
    leave_waiting,
    pop_one_by_one,
    report_failed,
    watch_failed_loads,
    whole_requests,
)
from kvpatch.legacy.peer_liveness import require_answer
from kvpatch.load.registration import registration_step
from kvpatch.transfer.nixl import errors_of
from kvpatch.worker.state import worker_state


def _read_or_leave_waiting(
    wrapped: Callable[..., Any], instance: Any, req_id: str, meta: Any
) -> Any:
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


def _start_load_kv(wrapped: Callable[..., Any], instance: Any, metadata: Any) -> Any:
    entries = metadata.reqs_to_recv.items()
    # One without blocks only tells P, and nobody waits for it.
    loading = (req_id for req_id, entry in entries if entry.local_block_ids)
    worker_state(instance).of(StuckLoads).begin(loading)
    return wrapped(metadata)


def _get_finished_and_given_up(
    wrapped: Callable[..., Any], instance: Any, finished_req_ids: set[str]
) -> Any:
    sent, received = wrapped(finished_req_ids)
    loads = worker_state(instance.connector_worker).of(StuckLoads)
    return sent, loads.report(received or (), finished_req_ids)


def _handshake_with_the_living(
    wrapped: Callable[..., Any],
    instance: Any,
    host: str,
    port: int,
    remote_tp_size: int,
    expected_engine_id: str,
) -> Any:
    ratio = instance._tp_size[instance.engine_id] // remote_tp_size
    if ratio > 0:  # of more ranks than ours the release makes an error, before it asks
        release = sys.modules[worker_state(instance).facts.worker.module]
        address = release.make_zmq_path("tcp", host, port + instance.tp_rank // ratio)
        require_answer(address, release.GET_META_MSG)
    return wrapped(host, port, remote_tp_size, expected_engine_id)


def _pop_done_or_leave_waiting(
    wrapped: Callable[..., Any], instance: Any, transfers: dict[str, Any]
) -> Any:
    def failed(req_id: str) -> None:
        leave_waiting(worker_state(instance).of(StuckLoads), req_id, "its read broke off")

    # The release makes a RuntimeError of the state ERR.
    return pop_one_by_one(instance, wrapped, transfers, (RuntimeError,), failed)


def _pop_done_or_failed(
    wrapped: Callable[..., Any], instance: Any, transfers: dict[str, Any]
) -> Any:
    def failed(req_id: str) -> None:
        metadata = instance._recving_metadata.get(req_id)
        if metadata is not None:
            instance._invalid_block_ids.update(metadata.local_block_ids)
        instance._failed_recv_reqs.add(req_id)

    done = pop_one_by_one(instance, wrapped, transfers, (), failed)
    # The release drops the metadata of those that failed, and calls them done.
    broken = {req_id for req_id in done if req_id not in instance._recving_metadata}
    for req_id in broken:
        instance._failed_recv_reqs.add(req_id)
    return done - broken


def _worker_get_finished(
    wrapped: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any
) -> Any:
    sent, received = wrapped(*args, **kwargs)
    unreported = instance._failed_recv_reqs
    if isinstance(unreported, FailedRequestSet):
        failed = report_failed(instance, unreported)
        for req_id in failed:
            worker_state(instance).book.fail(req_id)
        received = set(received) | failed
    return sent, received


def _handle_failed_transfer(
    wrapped: Callable[..., Any], instance: Any, req_id: str, handle: Any
) -> Any:
    if has_several_groups(instance):
        worker_state(instance).of(FailedGroupLoads).add(req_id)
    return wrapped(req_id, handle)


def _get_finished(wrapped: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any:
    worker = instance.connector_worker
    if worker is None or not has_several_groups(worker):
        return wrapped(*args, **kwargs)
    loading = {
        name: metadata.local_block_ids for name, metadata in worker._recving_metadata.copy().items()
    }
    sent, received = wrapped(*args, **kwargs)
    return sent, worker_state(worker).of(FailedGroupLoads).report(set(received or ()), loading)


def _get_block_ids_with_load_errors(
    wrapped: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any
) -> Any:
    found = wrapped(*args, **kwargs)
    worker = instance.connector_worker
    if worker is None or not has_several_groups(worker):
        return found
    return set(found) | worker_state(worker).of(FailedGroupLoads).take_invalid()


def _update_requests_with_invalid_blocks(
    wrapped: Callable[..., Any],
    instance: Any,
    requests: Iterable[Any],
    invalid_block_ids: set[int],
    *more: Any,
    **named: Any,
) -> Any:
    if len(instance.kv_cache_config.kv_cache_groups) == 1:
        return wrapped(requests, invalid_block_ids, *more, **named)
    failed, tokens, others = whole_requests(instance, requests, invalid_block_ids)
    if others:  # of another connector, that loads in step with the model
        return wrapped(others, invalid_block_ids, *more, **named)
    return failed, tokens, set()


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    """What is wrapped in a release that needs it."""
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
