"""Has D compute a prompt that has waited longer than P keeps it (``<= 0.11.0``).

No single load can fail there: a worker that finds out too late can only leave it unfinished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvpatch.core import seams
from kvpatch.core.ledger import Site, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.load.read_request import Waits, leave_unread
from kvpatch.load.reader_attachment import leases_of
from kvpatch.worker.state import connector_scheduler, scheduler_state

_LOG = logging.getLogger("kvpatch.stale_blocks")


def _get_num_new_matched_tokens(
    wrapped: Callable[..., Any], instance: Any, request: Any, *more: Any, **named: Any
) -> Any:
    found, scheduler = wrapped(request, *more, **named), connector_scheduler(instance)
    state = scheduler_state(scheduler)
    lease = leases_of(None, state.facts).seconds
    if not found[0] or state.of(Waits).since(request.arrival_time) <= lease:
        return found
    leave_unread(scheduler, request, state.facts)
    _LOG.warning(
        "request %s has waited for more than the %.0f s that P keeps its blocks for "
        "(VLLM_NIXL_ABORT_REQUEST_TIMEOUT): it is computed here",
        *(shown(request.request_id), lease),
    )
    return 0, False


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    """What is wrapped in a release that needs it."""
    return {seams.get_num_new_matched_tokens(facts): _get_num_new_matched_tokens}
