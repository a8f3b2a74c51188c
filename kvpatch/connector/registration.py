"""What becomes of the tensors that vLLM hands to a worker, one step after the other.

host_buffer     the device's tensors are replaced by those of a host buffer
failed_loads    the worker keeps its failed requests until they may be reported
unlike_engines  the tensors are read, as reads will fill them
block_count     as many blocks are planned as the tensors have
kvcached_regions  they are shown to the release as their blocks lie
shared_tensors  those that layers share are left in once
                the release registers what is left
unlike_engines  the worker is given its reader

Each is a patch's, and is left out where that is off or not needed. What only old releases need
(``kvpatch.legacy``) their patches hand over with their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpatch.connector.block_counts import count_blocks
from kvpatch.connector.host_buffer import worker as host_buffer_worker
from kvpatch.connector.local.release_layouts import registration_of
from kvpatch.connector.local_cache import inspect
from kvpatch.connector.presentation import Register, register_as_they_lie, register_once
from kvpatch.connector.reader_attachment import attach_reader
from kvpatch.connector.state import worker_state
from kvpatch.core import seams
from kvpatch.core.errors import HostBufferRefused
from kvpatch.core.ledger import Site, Step
from kvpatch.core.releases import ReleaseFacts

_Steps = dict[Site, Step]


def registration_step(facts: ReleaseFacts, part: Callable[..., None] | None = None) -> _Steps:
    """A patch's part in the wrapper; which part that is its slug says.

    Args:
        part: of ``failed_loads``, what watches a worker's; of ``unlike_engines``, what proves of
            peers what their handshakes leave open, where they do.
    """
    return {seams.register_kv_caches(facts): Step(partial(register_kv_caches, facts=facts), part)}


def register_kv_caches(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: Mapping[str, Any],
    facts: ReleaseFacts,
) -> Any:
    """Wraps a worker's own.

    Args:
        steps: the parts that are taken, by their patches.
    """

    def register(kv_caches: Mapping[str, Any]) -> Any:
        return Registering(instance, facts, dict(steps)).run(wrapped, kv_caches)

    return register(*args, **kwargs)


@dataclass(frozen=True)
class Registering:
    """One worker that registers its tensors, in the steps that are on."""

    worker: Any
    facts: ReleaseFacts
    steps: Mapping[str, Any]

    def run(self, release: Register, kv_caches: Mapping[str, Any]) -> Any:
        """Registers the tensors with `release`, and returns what that returns.

        Raises:
            RegistrationRefused, HostBufferRefused, UnreadableGeometry: they cannot be.
        """
        worker, registration, reads = self.worker, registration_of(self.facts), self._reads
        if "host_buffer" in self.steps:
            kv_caches = self._through_host_buffer(kv_caches)
        if "failed_loads" in self.steps:
            self.steps["failed_loads"](worker)
        own = inspect(worker, registration, kv_caches) if reads else None
        if "block_count" in self.steps:
            count_blocks(worker, registration, kv_caches)
        if "shared_tensors" in self.steps:
            release = partial(register_once, release, worker)
        if "kvcached_regions" in self.steps:
            release = partial(
                register_as_they_lie, release, registration, worker, is_read_by_us=reads
            )
        result = release(kv_caches)
        if own is not None:
            attach_reader(worker, self.facts, kv_caches, own, self.steps["unlike_engines"])
        return result

    @property
    def _reads(self) -> bool:
        return "unlike_engines" in self.steps

    def _through_host_buffer(self, kv_caches: Mapping[str, Any]) -> Mapping[str, Any]:
        """The buffer's tensors in place of the device's, where this worker is to have one.

        Raises:
            HostBufferRefused: nobody would read into it.
        """
        state = worker_state(self.worker)
        if not state.is_host_buffered:
            return kv_caches
        if not hasattr(self.worker, "_read_blocks_for_req"):
            raise HostBufferRefused(
                "in push mode P writes to D's memory, past a host buffer: use NixlConnector, which "
                "pulls, or KVPATCH_HOST_BUFFER=never"
            )
        if not self._reads:
            raise HostBufferRefused(
                "what D reads goes through the host buffer by unlike_engines, which "
                "KVPATCH_DISABLE turns off: leave it on, or use KVPATCH_HOST_BUFFER=never"
            )
        buffer = host_buffer_worker.make(registration_of(self.facts), self.worker, kv_caches)
        state.host_buffer, state.pages = buffer, buffer.pages
        return buffer.pool.tensors
