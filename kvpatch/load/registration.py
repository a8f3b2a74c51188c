"""The steps between the tensors that vLLM hands to a worker and their registration, in order.

host_buffer     the device's tensors are replaced by those of a host buffer
stale_blocks    the worker gets a table of what it holds, which it states with its memory
digests         it gets a table of their digests
failed_loads    the worker keeps its failed requests until they may be reported
unlike_engines  the tensors are read, as reads will fill them
block_count     as many blocks are planned as the tensors have
kvcached_regions  they are shown to the release as their blocks lie
shared_tensors  those that layers share are left in once
                the release registers what is left
unlike_engines  the worker is given its reader
named_factors   the worker says how peers with another hash differ
metrics         it describes itself in its metrics

Each is a patch's, and is left out where that is off or not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from kvpatch.core import seams
from kvpatch.core.ledger import Method, Parts, Site, Step
from kvpatch.core.releases import ReleaseFacts
from kvpatch.worker.state import release_worker, worker_state

if TYPE_CHECKING:
    from kvpatch.load.shown_tensors import Register
    from kvpatch.worker.release_worker import ReleaseWorker


def registration_step(
    facts: ReleaseFacts, part: Callable[..., object] | None = None
) -> dict[Site, Step]:
    """Returns a patch's part in the call; which part that is its slug says.

    Args:
        part: watches a worker's loads (``failed_loads``), adds to answers (``unlike_engines``
            ``<= 0.11.0``), makes a table (``stale_blocks``, ``digests``), says what is
            shown of the worker (``metrics``), or makes the buffer
            and returns its tensors (``host_buffer``).
    """
    return {seams.register_kv_caches(facts): Step(register_kv_caches, part)}


def register_kv_caches(method: Method, parts: Parts) -> Method:
    """Takes the place of a worker's own, with the steps of the patches that are on."""

    @wraps(method)
    def register_kv_caches(self: Any, kv_caches: Mapping[str, Any]) -> Any:
        register, steps = partial(method, self), parts.by_slug
        if not steps:
            return register(kv_caches)
        return _register(release_worker(self), steps, register, kv_caches)

    return register_kv_caches


def _register(
    release: ReleaseWorker,
    steps: Mapping[str, Any],
    register: Register,
    kv_caches: Mapping[str, Any],
) -> Any:
    """Registers tensors in the steps that are on."""
    # Schedulers, which register nothing, import none of it.
    from kvpatch.load import shown_tensors
    from kvpatch.load.reader_attachment import attach_reader, inspect

    worker, reads = release.worker, "unlike_engines" in steps
    state = worker_state(worker)
    if "host_buffer" in steps and state.is_host_buffered:
        shown_tensors.refuse_without_reads(
            release, "a host buffer", "KVPATCH_HOST_BUFFER=never", reads=reads
        )
        kv_caches = steps["host_buffer"](release, kv_caches)
    for slug in ("stale_blocks", "digests", "failed_loads"):
        if slug in steps:
            steps[slug](release)
    own = inspect(release, kv_caches) if reads else None
    if "block_count" in steps:
        from kvpatch.kvcached.pools import count_blocks

        count_blocks(release, kv_caches)
    if "shared_tensors" in steps:
        register = partial(shown_tensors.register_once, register, worker)
    if "kvcached_regions" in steps:
        register = partial(
            shown_tensors.register_as_they_lie, register, release, is_read_by_us=reads
        )
    answers = steps.get("unlike_engines")
    with nullcontext() if answers is None or own is None else answers(release, own):
        result = register(kv_caches)
    if own is not None:
        attach_reader(release, kv_caches, own)
    if "named_factors" in steps and release.pulls:
        from kvpatch.peer.peer_hash import compare_by_factor

        compare_by_factor(release, checks=reads)
    if "metrics" in steps:
        steps["metrics"](release)
    return result
