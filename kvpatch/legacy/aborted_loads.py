"""The wrappers of ``aborted_loads``: what releases <= 0.15 make of aborted requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvpatch.core import seams
from kvpatch.core.ledger import Site, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.legacy.aborted_blocks import AbortedBlocks
from kvpatch.worker.state import engine_state, scheduler_state, schedulers_of


def _finish_requests(
    wrapped: Callable[..., Any],
    instance: Any,
    request_ids: str | Iterable[str],
    finished_status: Any,
) -> Any:
    ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
    with engine_state(instance).of(AbortedBlocks).ending(instance, ids):
        return wrapped(ids, finished_status)


def _connector_finished(wrapped: Callable[..., Any], instance: Any, request: Any) -> Any:
    answer = wrapped(request)
    if not answer[0]:  # else another connector keeps them
        _keep(instance, request)
    return answer


def _keep(core: Any, request: Any) -> None:
    aborts = engine_state(core).of(AbortedBlocks)
    if aborts.keep(core, request):
        for scheduler in schedulers_of(core):
            scheduler_state(scheduler).hold(aborts)


def _build_connector_meta(
    wrapped: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any
) -> Any:
    aborts = scheduler_state(instance).held(AbortedBlocks)
    if aborts is not None:
        aborts.withhold(instance)
    return wrapped(*args, **kwargs)


def _update_from_kv_xfer_finished(
    wrapped: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any
) -> Any:
    (output,) = (*args, *kwargs.values())  # whatever it is called
    result = wrapped(output)
    engine_state(instance).of(AbortedBlocks).end(instance, output.finished_recving or ())
    return result


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    """What is wrapped in a release that needs it."""
    return {
        seams.finish_requests(facts): _finish_requests,
        seams.connector_finished(facts): _connector_finished,
        seams.update_from_kv_xfer_finished(facts): _update_from_kv_xfer_finished,
        seams.build_connector_meta(facts): _build_connector_meta,
    }
