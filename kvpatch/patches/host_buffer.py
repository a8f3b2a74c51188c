"""KV goes through a bounded buffer in host memory where NIXL cannot reach the device's.

Why:
    TPUs and other devices hold caches that NIXL cannot register, and a network card would keep
    the pages of kvcached's, which are replaced under their addresses. The connector then
    mirrors the whole device cache in host memory, as many blocks as the device has; on
    0.10.0 not at all, later on a fixed list of platforms; and such an engine refuses
    peers of another block size.
Where:
    Schedulers and workers, on the side whose device needs it; P, D or both.
How:
    The release is told that its memory is the host's, and is handed a pool of host
    blocks in place of the device's. On P its scheduler keeps host blocks for a request that D
    will read before it is scheduled, each step copies the blocks that it completes, and P's
    answer names host blocks; they are free when the blocks are. A request that never fits is
    answered with the reason in place of parameters, and D computes it. D reads every peer
    through its staging pool, in host memory, and places it on the device.
Upstream:
    vLLM #18293, the mirror.
Limits:
    Attention in blocks only, and in pull mode. A stock peer must hold its own cache in
    host memory as well, or state what it holds (from 0.30).
Remove when:
    Every device can be registered, or the connector's own buffer is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpatch.core import seams
from kvpatch.core.ledger import Patch, Site, Step, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.host_buffer import host_buffer_links as links
from kvpatch.host_buffer.policy import is_to_be_read, is_wanted_here
from kvpatch.load.registration import registration_step
from kvpatch.worker.engine_steps import Around, around
from kvpatch.worker.envelope import SAVES, answer, message_on, write_step
from kvpatch.worker.state import release_worker, scheduler_state, worker_state

if TYPE_CHECKING:
    from kvpatch.worker.release_worker import ReleaseWorker

# --- the workers ---------------------------------------------------------------


def _worker_init(
    wrapped: Callable[..., Any],
    instance: Any,
    vllm_config: Any,
    *more: Any,
    facts: ReleaseFacts,
    **named: Any,
) -> None:
    if not is_wanted_here(vllm_config, facts):
        wrapped(vllm_config, *more, **named)
        return
    from kvpatch.host_buffer import worker as workers

    with workers.taken_for_host_memory(vllm_config, facts):
        wrapped(vllm_config, *more, **named)
    workers.become_plain(release_worker(instance))
    worker_state(instance).is_host_buffered = True


def _save(connector: Any, _: Any) -> None:
    """Saves a step's blocks, once vLLM has waited for its own saves."""
    worker = connector.connector_worker
    if worker is None or not worker_state(worker).is_host_buffered:
        return
    from kvpatch.host_buffer.worker import HostBuffer

    buffer = worker_state(worker).held(HostBuffer)
    copies = None if buffer is None else message_on(connector._connector_metadata).get(SAVES)
    if buffer is not None and copies is not None:
        buffer.save(copies)


def _set_host_xfer_buffer_ops(
    wrapped: Callable[..., Any], instance: Any, copy_operation: Any
) -> Any:
    worker = instance.connector_worker
    if worker is None or not worker_state(worker).is_host_buffered:
        return wrapped(copy_operation)
    return None  # for the mirror of the release, which this worker does not have


def _make(release: ReleaseWorker, kv_caches: Any) -> Any:
    from kvpatch.host_buffer.worker import make

    return make(release, kv_caches)


# --- the connector's scheduler half ----------------------------------------------


def _scheduler_init(
    wrapped: Callable[..., Any],
    instance: Any,
    vllm_config: Any,
    *more: Any,
    facts: ReleaseFacts,
    **named: Any,
) -> None:
    wrapped(vllm_config, *more, **named)
    if is_wanted_here(vllm_config, facts):
        from kvpatch.host_buffer.scheduler import HostBufferScheduler

        instance.use_host_buffer = False
        state = scheduler_state(instance)
        buffer = HostBufferScheduler(facts)
        buffer.book, state.is_host_buffered = state.book, True
        state.hold(buffer)


def _get_num_new_matched_tokens(
    wrapped: Callable[..., Any], instance: Any, request: Any, num_computed_tokens: int
) -> Any:
    buffer = links.host_buffer_of(instance)
    if buffer is not None and is_to_be_read(request) and not buffer.admit(request):
        return None, False  # asked again in the next step
    return wrapped(request, num_computed_tokens)


def _write(scheduler: Any, output: Any) -> Callable[[Any], dict[str, Any]] | None:
    buffer = links.host_buffer_in(scheduler)
    return None if buffer is None else partial(buffer.plan, output)


def _answer(connector: Any, request: Any, _: Any) -> Callable[[Any], Any] | None:
    buffer = links.host_buffer_of(connector)
    if buffer is None:
        return None
    return partial(buffer.finished, connector.connector_scheduler, request)


# --- vLLM's scheduler --------------------------------------------------------------


def _schedule(wrapped: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any:
    """Hides requests without room, where connectors cannot ask for a later call (<= 0.10.1)."""
    links.link(instance)
    held = links.without_room(instance)
    if not held:
        return wrapped(*args, **kwargs)
    order = list(instance.waiting)
    instance.waiting.remove_requests(held)
    try:
        return wrapped(*args, **kwargs)
    finally:
        links.put_back(instance.waiting, order, held)


def _free(wrapped: Callable[..., Any], instance: Any, request: Any) -> Any:
    result = wrapped(request)
    links.freed(instance, request.request_id)
    return result


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    found: dict[Site, Wrapper | Step] = {
        seams.worker_init(facts): partial(_worker_init, facts=facts),
        **registration_step(facts, _make),
        seams.wait_for_save(facts): Step(around, Around(after=_save)),
        seams.scheduler_init(facts): partial(_scheduler_init, facts=facts),
        seams.get_num_new_matched_tokens(facts): _get_num_new_matched_tokens,
        seams.build_connector_meta(facts): Step(write_step, _write),
        seams.schedule(facts): (
            Step(around, Around(before=links.link)) if facts.can_answer_later else _schedule
        ),
    }
    found |= dict.fromkeys(seams.free_blocks(facts), _free)
    found |= dict.fromkeys(seams.request_finished(facts), Step(answer, _answer))
    if facts.has_host_buffer:
        found[seams.set_host_xfer_buffer_ops(facts)] = _set_host_xfer_buffer_ops
    return found


PATCH = Patch(slug="host_buffer", wire_affecting=True, sites=_sites, document=__doc__)
