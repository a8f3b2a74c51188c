"""The wrappers of releases whose handshakes leave open what a peer's blocks are (<= 0.20)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvpatch.connector import read_request
from kvpatch.connector.registration import registration_step
from kvpatch.connector.state import WorkerState, scheduler_state, schedulers_of, worker_state
from kvpatch.core import seams
from kvpatch.core.ledger import Site, Step, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.legacy.aborted_reads import AbortedReads
from kvpatch.legacy.content_proof.prover import ContentProver
from kvpatch.legacy.content_proof.prover_attachment import attach_prover
from kvpatch.legacy.content_proof.readable_engines import (
    ReadableEngines,
    ReadableReports,
    hear_workers,
    readable_engines_of,
    reports_in,
)


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    """What is wrapped in a release that needs it."""
    found: dict[Site, Wrapper | Step] = {
        **registration_step(facts, attach_prover),
        seams.scheduler_matched_tokens(facts): _get_num_new_matched_tokens,
        seams.start_load_kv(facts): _start_load_kv,
        seams.update_from_kv_xfer_finished(facts): _update_from_kv_xfer_finished,
        seams.get_finished(facts): _get_finished,
    }
    if facts.states_block_size:
        found[seams.set_xfer_handshake_metadata(facts)] = _set_xfer_handshake_metadata
    return found


def _prover_of(state: WorkerState) -> ContentProver | None:
    found = state.ambiguous_peers
    return found if isinstance(found, ContentProver) else None


def _get_num_new_matched_tokens(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def matched(request: Any, num_computed_tokens: int) -> Any:
        found = wrapped(request, num_computed_tokens)
        parameters = request.kv_transfer_params or {}
        engine_id, blocks = (parameters.get(f"remote_{key}") for key in ("engine_id", "block_ids"))
        if not found[0] or not isinstance(engine_id, str) or not isinstance(blocks, list | tuple):
            return found
        held = max((len(group) for group in read_request.groups(blocks)), default=0)
        needed = num_computed_tokens + found[0]
        return found if readable_engines_of(instance).allow(engine_id, held, needed) else (0, False)

    return matched(*args, **kwargs)


def _set_xfer_handshake_metadata(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def set_metadata(metadata: Mapping[int, Any]) -> Any:
        hear_workers(instance, metadata.values())
        return wrapped(metadata)

    return set_metadata(*args, **kwargs)


def _get_finished(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def get_finished(finished_req_ids: set[str]) -> Any:
        worker = instance.connector_worker
        if worker is None:
            return wrapped(finished_req_ids)
        state = worker_state(worker)
        prover = _prover_of(state)
        has_aborts = prover is not None and not state.facts.keeps_aborted_blocks
        if has_aborts:
            state.of(AbortedReads).end(worker, finished_req_ids)
        if prover is not None:
            prover.end_step()
        sent, received = wrapped(finished_req_ids)
        if has_aborts:
            received = state.of(AbortedReads).report(worker, received or ())
        return sent, state.of(ReadableReports).received(received, finished_req_ids)

    return get_finished(*args, **kwargs)


def _start_load_kv(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def start(metadata: Any) -> Any:
        state = worker_state(instance)
        prover, reports, facts = _prover_of(state), state.of(ReadableReports), state.facts
        found = read_request.read_requests_of(metadata)
        if prover is not None and not facts.keeps_aborted_blocks:
            loads = {name: request for name, request in found if any(request.local_blocks)}
            state.of(AbortedReads).begin(loads)
        for request_id, request in found:
            reports.listen()
            book = reports.load if any(request.local_blocks) else reports.compute
            book(request_id)
            if prover is not None and request.computed is not None:
                engine_id = read_request.engine_of(metadata.reqs_to_recv[request_id], facts)
                prover.computing(request_id, engine_id, request)
        return wrapped(metadata)

    return start(*args, **kwargs)


def _update_from_kv_xfer_finished(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def update(output: Any) -> Any:
        reports = reports_in(output.finished_recving or ())
        for scheduler in schedulers_of(instance) if reports else ():
            readable = scheduler_state(scheduler).held(ReadableEngines)
            if readable is not None:
                for engine_id, block_tokens in reports.values():
                    readable.prove(engine_id, block_tokens)
        if reports:  # which are no requests
            output.finished_recving = set(output.finished_recving) - reports.keys()
        return wrapped(output)

    return update(*args, *kwargs.values())
