"""The wrappers of releases whose handshakes leave open what a peer's blocks are (<= 0.20)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvpatch.connector import read_request
from kvpatch.connector.registration import registration_step
from kvpatch.connector.state import WorkerState, schedulers_of, worker_state
from kvpatch.core import seams
from kvpatch.core.ledger import Site, Step, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.legacy.aborted_reads import GivenUp
from kvpatch.legacy.announcements import Announcements, announced
from kvpatch.legacy.introducing import (
    book_proof,
    hear_what_is_open,
    introductions_of,
    prove_peers,
)
from kvpatch.legacy.proofs import Proofs


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    """What is wrapped in a release that needs it."""
    found: dict[Site, Wrapper | Step] = {
        **registration_step(facts, prove_peers),
        seams.scheduler_matched_tokens(facts): partial(_get_num_new_matched_tokens, facts=facts),
        seams.start_load_kv(facts): partial(_start_load_kv, facts=facts),
        seams.update_from_kv_xfer_finished(facts): _update_from_kv_xfer_finished,
        seams.get_finished(facts): partial(_get_finished, facts=facts),
    }
    if facts.states_block_size:
        found[seams.set_xfer_handshake_metadata(facts)] = _set_xfer_handshake_metadata
    return found


def _proofs_of(state: WorkerState) -> Proofs | None:
    reader = state.reader
    return reader.proofs if reader is not None and isinstance(reader.proofs, Proofs) else None


def _get_num_new_matched_tokens(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    facts: ReleaseFacts,
) -> Any:
    def matched(request: Any, num_computed_tokens: int) -> Any:
        found = wrapped(request, num_computed_tokens)
        parameters = request.kv_transfer_params or {}
        engine_id, blocks = (parameters.get(f"remote_{key}") for key in ("engine_id", "block_ids"))
        if not found[0] or not isinstance(engine_id, str) or not isinstance(blocks, list | tuple):
            return found
        introductions = introductions_of(instance, facts)
        if introductions is None:
            return found
        held = max((len(group) for group in read_request.groups(blocks)), default=0)
        if introductions.allow(engine_id, held, num_computed_tokens + found[0]):
            return found
        return 0, False

    return matched(*args, **kwargs)


def _set_xfer_handshake_metadata(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def set_metadata(metadata: Mapping[int, Any]) -> Any:
        hear_what_is_open(instance, metadata.values())
        return wrapped(metadata)

    return set_metadata(*args, **kwargs)


def _get_finished(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    facts: ReleaseFacts,
) -> Any:
    def get_finished(finished_req_ids: set[str]) -> Any:
        worker = instance.connector_worker
        if worker is None:
            return wrapped(finished_req_ids)
        state = worker_state(worker)
        proofs = _proofs_of(state)
        gives_up = proofs is not None and not facts.keeps_aborted_blocks
        if gives_up:
            state.of(GivenUp).end(worker, finished_req_ids)
        if proofs is not None:
            proofs.end_step()
        sent, received = wrapped(finished_req_ids)
        if gives_up:
            received = state.of(GivenUp).report(worker, received or ())
        return sent, state.of(Announcements).received(received, finished_req_ids)

    return get_finished(*args, **kwargs)


def _start_load_kv(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    facts: ReleaseFacts,
) -> Any:
    def start(metadata: Any) -> Any:
        state = worker_state(instance)
        proofs, announcements = _proofs_of(state), state.of(Announcements)
        found = read_request.orders_of(metadata)
        if proofs is not None and not facts.keeps_aborted_blocks:
            loads = {name: order for name, order in found if any(order.local_blocks)}
            state.of(GivenUp).begin(loads)
        for request_id, order in found:
            announcements.listen()
            book = announcements.load if any(order.local_blocks) else announcements.compute
            book(request_id)
            if proofs is not None and order.computed is not None:
                engine_id = read_request.engine_of(metadata.reqs_to_recv[request_id])
                proofs.computing(request_id, engine_id, order)
        return wrapped(metadata)

    return start(*args, **kwargs)


def _update_from_kv_xfer_finished(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def update(output: Any) -> Any:
        news = announced(output.finished_recving or ())
        for scheduler in schedulers_of(instance) if news else ():
            for engine_id, block_tokens in news.values():
                book_proof(scheduler, engine_id, block_tokens)
        if news:  # which are no requests
            output.finished_recving = set(output.finished_recving) - news.keys()
        return wrapped(output)

    return update(*args, *kwargs.values())
