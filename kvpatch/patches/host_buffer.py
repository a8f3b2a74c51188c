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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpatch.core import seams
from kvpatch.core.ledger import Patch, Site, Step, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.host_buffer.policy import is_to_be_read, is_wanted_here
from kvpatch.load.registration import registration_step
from kvpatch.worker.engine_steps import Around, around
from kvpatch.worker.envelope import SAVES, answer, message_on, write_step
from kvpatch.worker.state import (
    connector_scheduler,
    connectors_of,
    engine_state,
    release_worker,
    scheduler_state,
    share_with_manager,
    worker_state,
)

if TYPE_CHECKING:
    from kvpatch.host_buffer.scheduler import HostBufferScheduler
    from kvpatch.worker.release_worker import ReleaseWorker

# --- the workers ---------------------------------------------------------------


def _worker_init(
    wrapped: Wrapped, instance: Any, vllm_config: Any, *more: Any, facts: ReleaseFacts, **named: Any
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


def _set_host_xfer_buffer_ops(wrapped: Wrapped, instance: Any, copy_operation: Any) -> Any:
    worker = instance.connector_worker
    if worker is None or not worker_state(worker).is_host_buffered:
        return wrapped(copy_operation)
    return None  # for the mirror of the release, which this worker does not have


def _make(release: ReleaseWorker, kv_caches: Any) -> Any:
    from kvpatch.host_buffer.worker import make

    return make(release, kv_caches)


# --- the connector's scheduler half ----------------------------------------------


def _scheduler_init(
    wrapped: Wrapped, instance: Any, vllm_config: Any, *more: Any, facts: ReleaseFacts, **named: Any
) -> None:
    wrapped(vllm_config, *more, **named)
    if is_wanted_here(vllm_config, facts):
        from kvpatch.host_buffer.scheduler import HostBufferScheduler

        instance.use_host_buffer = False
        state = scheduler_state(instance)
        buffer = HostBufferScheduler(facts)
        buffer.book, state.is_host_buffered = state.book, True
        state.hold(buffer)


def _buffer_in(scheduler: Any) -> HostBufferScheduler | None:
    """Returns the account of a connector's scheduler half; None without a host buffer."""
    if not scheduler_state(scheduler).is_host_buffered:
        return None
    from kvpatch.host_buffer.scheduler import HostBufferScheduler

    return scheduler_state(scheduler).held(HostBufferScheduler)


def _account_of(connector: Any) -> HostBufferScheduler | None:
    """Returns the account of a connector; None in workers too."""
    scheduler = connector_scheduler(connector)
    return None if scheduler is None else _buffer_in(scheduler)


def _get_num_new_matched_tokens(
    wrapped: Wrapped, instance: Any, request: Any, num_computed_tokens: int
) -> Any:
    buffer = _account_of(instance)
    if buffer is not None and is_to_be_read(request) and not buffer.admit(request):
        return None, False  # asked again in the next step
    return wrapped(request, num_computed_tokens)


def _write(scheduler: Any, output: Any) -> Callable[[Any], dict[str, Any]] | None:
    buffer = _buffer_in(scheduler)
    return None if buffer is None else partial(buffer.plan, output)


def _answer(connector: Any, request: Any, _: Any) -> Callable[[Any], Any] | None:
    buffer = _account_of(connector)
    if buffer is None:
        return None
    return partial(buffer.finished, connector.connector_scheduler, request)


# --- vLLM's scheduler --------------------------------------------------------------


@dataclass(eq=False)
class LinkedBuffers:
    """The host buffers of one of vLLM's schedulers, as its connectors see them.

    Attributes:
        is_whole: whether these are all that there are.
    """

    buffers: list[HostBufferScheduler] = field(default_factory=list)
    is_whole: bool = False


def _link(core: Any) -> None:
    """Brings vLLM's scheduler and the buffers of its connectors together, before its first step."""
    linked = engine_state(core).of(LinkedBuffers)
    if linked.is_whole:
        return
    for connector in connectors_of(core):
        buffer = _account_of(connector)
        if buffer is not None and not buffer.is_linked:
            buffer.link(core, connector.connector_scheduler)
            linked.buffers.append(buffer)
            share_with_manager(core)
    linked.is_whole = True


def _schedule(wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any) -> Any:
    """Hides requests without room, where connectors cannot ask for a later call (<= 0.10.1)."""
    _link(instance)
    buffers = [buffer for buffer in map(_account_of, connectors_of(instance)) if buffer is not None]
    held = [
        request
        for request in (instance.waiting if buffers else ())
        if request.num_computed_tokens == 0
        and is_to_be_read(request)
        and not all(buffer.admit(request) for buffer in buffers)
    ]
    if not held:
        return wrapped(*args, **kwargs)
    order = list(instance.waiting)
    instance.waiting.remove_requests(held)
    try:
        return wrapped(*args, **kwargs)
    finally:
        put_back(instance.waiting, order, held)


def put_back(queue: Any, order: Iterable[Any], held: Sequence[Any]) -> None:
    """Puts requests back among those that are still in the queue, in the order from before.

    Those that were not there before, as preempted ones, stay in front.
    """
    place = {request.request_id: number for number, request in enumerate(order)}
    merged = sorted((*queue, *held), key=lambda request: place.get(request.request_id, -1))
    queue.remove_requests(list(queue))
    for request in merged:
        queue.add_request(request)


def _free(wrapped: Wrapped, instance: Any, request: Any) -> Any:
    result = wrapped(request)
    for buffer in engine_state(instance).of(LinkedBuffers).buffers:
        buffer.release(request.request_id)
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
            Step(around, Around(before=_link)) if facts.can_answer_later else _schedule
        ),
    }
    found |= dict.fromkeys(seams.free_blocks(facts), _free)
    found |= dict.fromkeys(seams.request_finished(facts), Step(answer, _answer))
    if facts.has_host_buffer:
        found[seams.set_host_xfer_buffer_ops(facts)] = _set_host_xfer_buffer_ops
    return found


PATCH = Patch(slug="host_buffer", wire_affecting=True, sites=_sites, document=__doc__)
