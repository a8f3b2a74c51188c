"""Finds the host buffer's account of a connector, of vLLM's scheduler and of its block manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpatch.host_buffer.policy import is_to_be_read
from kvpatch.worker.state import (
    connector_scheduler,
    connectors_of,
    engine_state,
    scheduler_state,
    share_with_manager,
)

if TYPE_CHECKING:
    from kvpatch.host_buffer.scheduler import HostBufferScheduler


@dataclass(eq=False)
class LinkedBuffers:
    """The host buffers of one of vLLM's schedulers, as its connectors see them.

    Attributes:
        is_whole: whether these are all that there are.
    """

    buffers: list[HostBufferScheduler] = field(default_factory=list)
    is_whole: bool = False


def host_buffer_of(connector: Any) -> HostBufferScheduler | None:
    """The account of a connector; None in workers, and without a host buffer."""
    scheduler = connector_scheduler(connector)
    return None if scheduler is None else host_buffer_in(scheduler)


def host_buffer_in(scheduler: Any) -> HostBufferScheduler | None:
    """The account of a connector's scheduler half; None without a host buffer."""
    if not scheduler_state(scheduler).is_host_buffered:
        return None
    from kvpatch.host_buffer.scheduler import HostBufferScheduler

    return scheduler_state(scheduler).held(HostBufferScheduler)


def link(core: Any) -> None:
    """Brings vLLM's scheduler and the buffers of its connectors together, before its first step."""
    linked = engine_state(core).of(LinkedBuffers)
    if linked.is_whole:
        return
    for connector in connectors_of(core):
        buffer = host_buffer_of(connector)
        if buffer is not None and not buffer.is_linked:
            buffer.link(core, connector.connector_scheduler)
            linked.buffers.append(buffer)
            share_with_manager(core)
    linked.is_whole = True


def freed(manager: Any, request_id: str) -> None:
    """The block manager has let go of a request's blocks."""
    for buffer in engine_state(manager).of(LinkedBuffers).buffers:
        buffer.release(request_id)


def without_room(core: Any) -> list[Any]:
    """Requests in the queue that the host buffer has no room for yet (<= 0.10.1)."""
    buffers = [buffer for buffer in map(host_buffer_of, connectors_of(core)) if buffer is not None]
    if not buffers:
        return []
    return [
        request
        for request in core.waiting
        if request.num_computed_tokens == 0
        and is_to_be_read(request)
        and not all(buffer.admit(request) for buffer in buffers)
    ]


def put_back(queue: Any, order: Iterable[Any], held: Sequence[Any]) -> None:
    """Puts requests back among those that are still in the queue, in the order from before.

    Those that were not there before, as preempted ones, stay in front.
    """
    place = {request.request_id: number for number, request in enumerate(order)}
    merged = sorted((*queue, *held), key=lambda request: place.get(request.request_id, -1))
    queue.remove_requests(list(queue))
    for request in merged:
        queue.add_request(request)
