"""D does not answer from blocks that P has given to another request.

Why:
    P keeps a request's blocks until D has read them, or until a lease runs out that D's
    heartbeats renew. A D that is held up, or a P that drops a request, ends with P's blocks in
    another request's hands while D still reads them. P's worker only logs that it was told too
    late; D reports the load as received, and answers with HTTP 200 from another prompt's keys
    and values.
Where:
    Schedulers and workers of both sides, like pairs and caches that vLLM alone reads included. Of
    a P without kvpatch D counts the lease by its own clock (``transfer/lease.py``), on every
    release.
How:
    Each worker of P registers a small table in host memory. When a request that D will read gets
    its blocks, the scheduler draws a word that no other request ever had, the workers write it
    into their tables, and P's answer carries it and the tables' places (``kvpatch_hold``, one
    string). A worker takes the word out before it reports the request as sent, which is before
    anybody can get its blocks. D reads the data, then the word (8 bytes, one-sided: P need not
    step, or be awake), and only then tells P. Another word there, or none, fails the load, and
    D computes the prompt. A request that was long on its way asks
    before it reads, too.
Upstream:
    vLLM #52234; aws-samples/aws-do-eks#84 counts 8 of 42 answers.
Limits:
    <= 0.11.0 workers answer handshakes themselves, and the scheduler never learns where their
    tables are; there, in push mode, with other NIXL back ends than UCX, and where P has
    several pipeline stages nothing is stated, and D goes by P's lease. Whoever passes P's
    answer on must pass on all of it.
Remove when:
    The connector proves to D that P held the blocks to the end of the read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvpatch.checks.grants import GrantedHolds, StatedTables
from kvpatch.checks.hold_check import check_hold
from kvpatch.checks.tables import HoldTable, made_table
from kvpatch.core import seams, settings
from kvpatch.core.ledger import Patch, Site, Step, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.prompt_hashes import lacks_images
from kvpatch.load.read_request import HOLD, held_tokens
from kvpatch.load.reader import CheckMakers, Loads
from kvpatch.load.registration import registration_step
from kvpatch.worker.engine_steps import Around, amend, around, hear
from kvpatch.worker.envelope import (
    HOLDS,
    TABLES,
    answer,
    read_statement,
    read_step,
    write_statement,
    write_step,
)
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import connector_scheduler, held_by, scheduler_state, worker_state

_LOG = logging.getLogger("kvpatch.stale_blocks")

#: NIXL's back ends that are known to read a host's memory whatever the cache lies in.
_BACKENDS = frozenset(("UCX",))

# --- the workers ---------------------------------------------------------------


def _make_table(release: ReleaseWorker) -> None:
    """Makes a worker's table before it states what its agent has; of one start there is one."""
    worker, backends = release.worker, release.nixl_backends
    state = worker_state(worker)
    if not release.pulls or state.held(HoldTable) is not None:
        return
    if not backends or not _BACKENDS.issuperset(backends):
        named = ", ".join(backends) or "no NIXL back end named"
        _LOG.info("blocks gone stale are not looked for with %s", named)
        return
    table = made_table(release, HoldTable, _LOG, "blocks gone stale are not looked for")
    if table is not None:
        state.of(StatedTables)[HOLD] = table.address
        state.of(CheckMakers)["stale_blocks"] = lambda *_: partial(check_hold, table)


def _state(worker: Any) -> dict[str, Any]:
    tables = held_by(worker, StatedTables)
    return {TABLES: dict(tables)} if tables else {}


def _read(worker: Any, message: Mapping[str, Any]) -> None:
    """Writes words down before the model runs, which may take long: others wait for them."""
    table = held_by(worker, HoldTable)
    if table is not None:
        table.hear(message.get(HOLDS, {}))


def _take_results(worker: Any, results: Any) -> None:
    # A pair <= 0.29, as both are named here from 0.30.
    sent = results[0] if isinstance(results, tuple) else results.finished_sending
    table = held_by(worker, HoldTable) if sent else None
    if table is not None:
        for request_id in sent:
            table.end(request_id)


def _end_holds(worker: Any) -> None:
    table = held_by(worker, HoldTable)
    if table is not None:
        table.end_all()  # what the blocks hold is about to be lost


# --- the connector's scheduler half ----------------------------------------------


def _take_statements(scheduler: Any, metadata: Any) -> Any:
    scheduler_state(scheduler).of(GrantedHolds).learn(metadata)
    return metadata


def _holds_of(connector: Any) -> GrantedHolds | None:
    """A connector's; None in workers, and where its workers have no tables."""
    holds = held_by(connector_scheduler(connector), GrantedHolds)
    return holds if holds is not None and holds.is_on else None


def _update_state_after_alloc(
    wrapped: Wrapped, instance: Any, request: Any, *more: Any, **named: Any
) -> Any:
    holds = _holds_of(instance)
    if holds is not None and (request.kv_transfer_params or {}).get("do_remote_decode"):
        holds.grant(request.request_id)
    return wrapped(request, *more, **named)


def _write(scheduler: Any, _: Any) -> Callable[[Any], dict[str, Any]] | None:
    holds = held_by(scheduler, GrantedHolds)
    return holds.news if holds is not None and holds.has_news else None  # in few steps


def _answer(connector: Any, request: Any, block_ids: Any) -> Callable[[Any], Any] | None:
    holds = _holds_of(connector)
    if holds is None:
        return None

    def amended(found: Any) -> Any:
        keeps_blocks, params = found
        if keeps_blocks and params:
            is_buffered = scheduler_state(connector_scheduler(connector)).is_host_buffered
            held = held_tokens(request, params, prompt_alone=is_buffered)
            params = holds.answer(request, block_ids, params, held)
        else:
            holds.withdraw(request.request_id)
        return keeps_blocks, params

    return amended


# --- a load that a check has failed is computed ------------------------------------
#
# This holds whatever ``kv_load_failure_policy`` says, which is there for transfers that failed.
# Names of requests travel among the ids of blocks that could not be loaded, a set that executors
# hand on and join. The scheduler takes them out before the release looks, and does what that does
# to compute a load again (``_handle_failed_recving``).


def name_requests(connector: Any, blocks: set[int]) -> set[Any]:
    """Adds to the blocks that could not be loaded the names of requests that failed a check."""
    loads = worker_state(connector.connector_worker).held(Loads)
    names = () if loads is None else loads.failed_checks
    if not names:
        return blocks
    return blocks.union(names.popleft() for _ in range(len(names)))


def compute_again(core: Any, output: Any) -> None:
    """Makes vLLM's scheduler compute the requests that are named among invalid blocks.

    One that lacks P's images stays a failed load: what it computes would be of no image.
    """
    invalid = output.invalid_block_ids
    if not invalid:
        return
    names = {one for one in invalid if isinstance(one, str)}
    for name in names:
        request = core.requests.get(name)
        is_waiting = request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS"
        if is_waiting and not lacks_images(core, request):
            request.num_computed_tokens = 0
            core.failed_recving_kv_req_ids.add(name)
    # Of several cache groups a request's blocks may be reported steps behind its name. Another
    # connector's request of which some tokens are left may lose more of them, and so may those that
    # share a block.
    for name in core.failed_recving_kv_req_ids:
        if name in core.requests and not core.requests[name].num_computed_tokens:
            own = invalid & _blocks_of(core, name)
            if own:
                invalid = invalid - (own - _blocks_that_run(core))
    output.invalid_block_ids = invalid - names


def _blocks_of(core: Any, request_id: str) -> set[int]:
    return set[int]().union(*core.kv_cache_manager.get_block_ids(request_id))


def _blocks_that_run(core: Any) -> set[int]:
    """Returns the blocks of running requests, without the null block, which many have."""
    found = (_blocks_of(core, request.request_id) for request in core.running)
    return set[int]().union(*found) - {0}


def _handle_failed_recving(wrapped: Wrapped, instance: Any, failed_req_ids: set[str]) -> Any:
    """Fails no request that is computed, on releases that report requests as failed (from 0.30).

    They report with the last of a request's ranks, which may be steps after the first. Connectors
    beside NIXL's hear of the failure as reported: HiSparse's takes what has not failed for good.
    """
    return wrapped(failed_req_ids - instance.failed_recving_kv_req_ids)


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    if not facts.listens_in_scheduler:
        return {}
    found: dict[Site, Wrapper | Step] = {
        **registration_step(facts, _make_table),
        seams.get_handshake_metadata(facts): Step(write_statement, _state),
        seams.bind_connector_metadata(facts): Step(read_step, _read),
        seams.transfer_results(facts): Step(around, Around(after=_take_results)),
        seams.set_xfer_handshake_metadata(facts): Step(read_statement, _take_statements),
        seams.update_state_after_alloc(facts): _update_state_after_alloc,
        seams.build_connector_meta(facts): Step(write_step, _write),
    }
    if facts.can_sleep:
        found[seams.unregister_kv_caches(facts)] = Step(around, Around(before=_end_holds))
    if settings.on_failed_check() == "recompute":
        named = Step(amend, name_requests)
        found[seams.get_block_ids_with_load_errors(facts)] = named
        found[seams.update_from_output(facts)] = Step(hear, compute_again)
        if facts.failed_loads == "as failed":
            found[seams.handle_failed_recving(facts)] = _handle_failed_recving
    return found | dict.fromkeys(seams.request_finished(facts), Step(answer, _answer))


PATCH = Patch(
    slug="stale_blocks",
    wire_affecting=False,
    sites=_sites,
    not_needed="<= 0.11.0 the scheduler does not know what its workers state",
    document=__doc__,
)
