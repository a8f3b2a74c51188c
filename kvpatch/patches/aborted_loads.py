"""The blocks of an aborted request are not handed out while they are being written to.

Why:
    A client that gives up while D loads its prompt ends the request, and to 0.15 its
    blocks are free at once. The read goes on and writes into them, whoever has
    them by then: another request answers with tokens of the wrong prompt.
Where:
    vLLM's scheduler, on D.
How:
    As 0.16 does, the blocks of a request that ends while it is loaded are kept until the
    workers report the load, done or failed. What was reported and not yet scheduled
    is forgotten, so that a later request of the same name is not taken for it. To 0.13
    clients choose names: a request that comes back under its name gets blocks of its own,
    and is loaded when the workers have reported the first load, for they report by name.
Upstream:
    0.16 delays freeing in `finish_requests`.
Limits:
    An engine that has nothing else to do frees them with its next step, as it does on P.
Remove when:
    0.15 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvpatch.core import seams
from kvpatch.core.ledger import Patch, Site, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.vllm.state import connectors_of, engine_state, scheduler_state


def _finish_requests(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def finish(request_ids: str | Iterable[str], finished_status: Any) -> Any:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with engine_state(instance).aborts.ending(instance, ids):
            return wrapped(ids, finished_status)

    return finish(*args, **kwargs)


def _connector_finished(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def finished(request: Any) -> Any:
        answer = wrapped(request)
        if not answer[0]:  # else another connector keeps them
            _keep(instance, request)
        return answer

    return finished(*args, **kwargs)


def _keep(core: Any, request: Any) -> None:
    aborts = engine_state(core).aborts
    if aborts.keep(core, request):
        for connector in connectors_of(core):
            scheduler = getattr(connector, "connector_scheduler", None)
            if scheduler is not None:
                scheduler_state(scheduler).aborts = aborts


def _build_connector_meta(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    aborts = scheduler_state(instance).aborts
    if aborts is not None:
        aborts.withhold(instance)
    return wrapped(*args, **kwargs)


def _update_from_kv_xfer_finished(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def update(output: Any) -> Any:
        result = wrapped(output)
        engine_state(instance).aborts.end(instance, output.finished_recving or ())
        return result

    return update(*args, *kwargs.values())


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    if facts.keeps_aborted_blocks:
        return {}
    return {
        seams.finish_requests(facts): _finish_requests,
        seams.connector_finished(facts): _connector_finished,
        seams.update_from_kv_xfer_finished(facts): _update_from_kv_xfer_finished,
        seams.build_connector_meta(facts): _build_connector_meta,
    }


PATCH = Patch(
    slug="aborted_loads",
    wire_affecting=False,
    sites=_sites,
    not_needed="since 0.16 the release keeps them itself",
    document=__doc__,
)
