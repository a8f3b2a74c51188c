"""The wrappers of ``unlike_engines`` that only old releases need.

================  ========================================================  ======================
release           it                                                        here
================  ========================================================  ======================
``<= 0.15``       hands out the blocks of an aborted request at once        ``aborted_reads``
``<= 0.13``       shakes hands with one rank of P                           ``multi_rank``
``<= 0.11.0``     answers handshakes in each worker                         ``words_in_answers``
``<= 0.11.0``     cannot fail a load that comes too late                    ``_loaded_in_time``
``0.10.0``        loads whole blocks, and one more for drafted tokens       ``_whole_blocks``
================  ========================================================  ======================
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

from kvpatch.core import seams, settings
from kvpatch.core.ledger import Site, Step, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.legacy import aborted_reads
from kvpatch.load import read_request
from kvpatch.load.reader_attachment import can_read, leases_of
from kvpatch.load.registration import registration_step
from kvpatch.load.stated_prompt import read_prompt
from kvpatch.peer.cross_layer_blocks import listener_told
from kvpatch.peer.inspected_caches import InspectedCaches
from kvpatch.peer.stated_words import with_names, words_of
from kvpatch.worker.kv_cache_groups import reserves_slots
from kvpatch.worker.local_geometry import local_geometry_of
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import connector_scheduler, scheduler_state
from kvpatch.worker.unpatched_workers import is_applied

_LOG = logging.getLogger("kvpatch.stale_blocks")


def words_in_answers(release: ReleaseWorker, own: InspectedCaches) -> AbstractContextManager[None]:
    """Adds P's statement to the answers of a worker that starts to answer, while inside."""
    if own.cache is None or not can_read(release, own):
        return nullcontext()
    layers, _, key_order = own.cache
    # The thread that answers handshakes never ends, and is not to keep the worker.
    this_worker, facts = ref(release.worker), release.facts

    def restate(metadata: Any) -> Any:
        asked = ReleaseWorker(this_worker(), facts)
        return with_names(metadata, words_of(asked, local_geometry_of(asked, layers, key_order)))

    return listener_told(release, restate)


def _loaded_in_time(
    wrapped: Callable[..., Any], instance: Any, request: Any, *more: Any, **named: Any
) -> Any:
    """Loads no prompt that has waited longer than P keeps its blocks: D computes it.

    A worker that finds out too late can only leave the load unfinished.
    """
    found, scheduler = wrapped(request, *more, **named), connector_scheduler(instance)
    state = scheduler_state(scheduler)
    lease = leases_of(None, state.facts).seconds
    if not found[0] or state.of(read_request.Waits).since(request.arrival_time) <= lease:
        return found
    read_request.leave_unread(scheduler, request, state.facts)
    _LOG.warning(
        "request %s has waited for more than the %.0f s that P keeps its blocks for "
        "(VLLM_NIXL_ABORT_REQUEST_TIMEOUT): it is computed here",
        *(shown(request.request_id), lease),
    )
    return 0, False


def _whole_blocks(
    wrapped: Callable[..., Any], instance: Any, request: Any, num_computed_tokens: int
) -> Any:
    """Loads only the tokens that P's whole blocks hold: D computes the rest.

    P names whole blocks only. Where these hold fewer tokens than D wants, 0.10.0 takes P's last
    blocks for later ones, or ends.
    """
    count, is_async = wrapped(request, num_computed_tokens)
    if not count:
        return count, is_async
    held = _held_tokens(instance, request, num_computed_tokens + count)
    count = max(0, min(count, held - num_computed_tokens))
    return count, is_async and count > 0


def _held_tokens(scheduler: Any, request: Any, wanted: int) -> int:
    """Returns up to where D loads a prompt; 0 where P's blocks hold too few of the wanted tokens.

    A P with kvpatch states how many they hold: D loads as many of them as fill its own blocks.
    """
    if reserves_slots(scheduler.vllm_config):
        return 0
    params, block_tokens = request.kv_transfer_params or {}, int(scheduler.block_size)
    stated, blocks = read_prompt(params), params.get("remote_block_ids")
    if stated is not None and is_applied("same_prompt"):
        return stated.tokens - stated.tokens % block_tokens
    if not isinstance(blocks, list | tuple):
        return 0
    named = max((len(group) for group in read_request.groups(blocks)), default=0)
    held = named * (settings.peer_block_size() or block_tokens)
    return wanted if held >= wanted else 0


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    """Returns what is wrapped in a release ``<= 0.15`` beside what all need."""
    found: dict[Site, Wrapper | Step] = {**aborted_reads.sites(facts)}
    if facts.meets_one_rank:
        from kvpatch.legacy import multi_rank

        found |= multi_rank.sites(facts)
    if not facts.listens_in_scheduler:
        found |= registration_step(facts, words_in_answers)
        found[seams.get_num_new_matched_tokens(facts)] = _loaded_in_time
    if facts.loads_whole_blocks_only:
        found[seams.scheduler_matched_tokens(facts)] = _whole_blocks
    return found
