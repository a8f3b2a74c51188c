"""A decode engine reads from a prefill engine of another block size or layout.

Why:
    The connector copies blocks as opaque runs of bytes. A prefill engine with
    larger blocks is refused at the first request (``Local block size 32 is not
    divisible by remote block size 128``), one with an NHD cache at the
    handshake; smaller prefill blocks are read wrongly, without an error, where
    the last block is partial and there is a prefix hit, where K and V are packed
    in HND (0.26 to 0.31), and wherever the CPU backend stores keys by column.
    A decode engine on a CPU reorders the loads of every peer once it has met one of another
    backend (from 0.20), those of peers whose blocks are like its own too.
    0.11.1 and 0.11.2 fail every handshake of a decode engine that cuts its blocks
    into kernel blocks, and on a CPU they take the number of heads for the block size.
    <= 0.13 a prefill engine of more ranks fails every handshake, and on most releases pairs
    of unlike ranks do where there are more ranks than KV heads on either side.
Where:
    D's scheduler and worker. P needs nothing.
How:
    At the handshake D works out where each of P's layers, heads and tokens lies,
    and shows the release a peer like itself, within the memory that P registered.
    The release goes on to keep its books, notify and complete as ever; the one
    transfer that it prepares for a request is replaced by the byte runs between
    the two geometries, paired by token position. Like pairs are left to it. On releases <= 0.13 D
    shakes hands with one rank of P alone: of a P with more ranks than D's it is led to
    each that it needs, one after the other, and a request's reads from all are one to it.
    Where kvpatch is not on in D's workers (from 0.11.1), D loads from peers whose blocks have shown
    to be as large as its own, by a prompt of several, and computes the rest.
    A worker leaves out notifications of NIXL's that would end its engine, whoever sends them.
Upstream:
    vLLM #26744 and #30448, closed; #52234 and #42895 ask for it.
Limits:
    <= 0.20 the handshake does not say all of a block: the data type <= 0.11.0, the layout on
    0.10.0, and then how blocks are cut, where a backend may cut them (FlashInfer, FlashMLA).
    P's kvpatch states the rest, or ``KVPATCH_PEER_BLOCK_SIZE`` (and ``KVPATCH_PEER_LAYOUT`` on
    0.10.0) declares it. Where neither does, a P that fits a like engine is left to vLLM with one
    warning, and any other is refused. On 0.10.0 what ends behind P's whole blocks D computes, and
    with a draft model every prompt.
    On releases <= 0.13 the ranks of a P with more than D are a multiple of D's.
    Refused are a CPU's keys of which nobody says whether AMX tiles them (P's kvpatch says it, or
    ``KVPATCH_PEER_KEYS``), and <= 0.24 models of windows alone, or of groups of unlike
    shapes, with a draft model; such groups need one tensor-parallel size.
    Of several cache groups a P in BLNHC or BHLNC
    (0.29 on), whose blocks are cross-layer blocks, is refused, and so are padded ones. A
    D with vLLM's own host buffer, shared KV layers or context parallelism
    leaves unlike peers to the release, as far as that reads them rightly (a mirror exchanges whole
    blocks alone <= 0.25; with context parallelism P's lists have to fit D's <= 0.28). Of smaller
    blocks, which it pairs with wrong tokens behind a prefix hit, it is handed those that it pairs
    rightly; a request that has no such blocks fails
    alone. A peer of smaller blocks is refused where the release misreads each of its requests
    (keys by column; heads, 0.23 to 0.31, or in NHD).
    Recurrent state is read whole from as many ranks as D's and of as many bytes. Between plain
    pools of unlike ranks each rank's true share of it is read (0.20 on: Mamba2, Mamba1, gated
    delta nets), but where all parts are shared out and blocks are alike, which is the release's.
Remove when:
    The connector reads any block size and layout, prefix hits included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kvpatch.core import seams
from kvpatch.core.ledger import Patch, Site, Step, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load import read_request
from kvpatch.load.common_prompt import PromptLoads, may_load
from kvpatch.load.read_request import ReorderedLoads, note_loads
from kvpatch.load.registration import registration_step
from kvpatch.peer.other_releases import Address
from kvpatch.worker.engine_steps import Around, around
from kvpatch.worker.envelope import WORDS, read_statement, write_statement, write_step
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.state import (
    held_by,
    is_push,
    release_worker,
    scheduler_state,
    schedulers_of,
    worker_state,
)
from kvpatch.worker.unpatched_workers import is_guarded

_LOG = logging.getLogger("kvpatch.unlike_engines")


def _add_remote_agent(
    wrapped: Wrapped,
    instance: Any,
    nixl_agent_meta: Any,
    remote_tp_rank: int = 0,
    remote_tp_size: int = 1,
    *contexts: Any,
) -> Any:
    from kvpatch.load.remote_agents import Handshake, local_cache
    from kvpatch.peer.decision import decide

    told = nixl_agent_meta, remote_tp_rank, remote_tp_size
    release = release_worker(instance)
    handshake = Handshake(wrapped, release, *told, contexts)
    if not release.pulls:
        return handshake.as_release()
    with worker_state(instance).book.refusals():
        local = local_cache(release)
        remote = handshake.read(local)
        return handshake.act(decide(local, remote, release.facts))


def _read_blocks_for_req(wrapped: Wrapped, instance: Any, req_id: str, meta: Any) -> Any:
    from kvpatch.load.read_dispatch import request_read

    with request_read(instance, req_id, meta):
        return wrapped(req_id, meta)


def _note_loads(worker: Any) -> None:
    # Once it has met a peer.
    if held_by(worker, ReorderedLoads) and worker.enable_heterogeneous_attn_post_process:
        note_loads(worker)


def _reorder_received(wrapped: Wrapped, instance: Any, block_ids: Any) -> Any:
    if worker_state(instance).of(ReorderedLoads).is_reordered(block_ids):
        wrapped(block_ids)


def _add_request(wrapped: Wrapped, instance: Any, request: Any) -> Any:
    for scheduler in schedulers_of(instance):
        scheduler_state(scheduler).of(read_request.Waits).take(request.arrival_time)
    return wrapped(request)


def _attach_reads(scheduler: Any, _: Any) -> Callable[[Any], None] | None:
    waiting = scheduler._reqs_need_recv
    if not waiting:
        return None  # as in most steps
    return partial(read_request.attach_read_requests, scheduler, dict(waiting))


def _get_num_new_matched_tokens(
    wrapped: Wrapped, instance: Any, request: Any, *more: Any, **named: Any
) -> Any:
    found, scheduler = wrapped(request, *more, **named), instance.connector_scheduler
    if found[0] and not (
        may_load(scheduler, request, scheduler_state(scheduler).facts)
        and not _is_kept_from_workers(scheduler, request)
    ):
        return 0, False
    return found


def _is_kept_from_workers(scheduler: Any, request: Any) -> bool:
    """True of a load that workers without kvpatch may read wrongly: D computes the prompt.

    So it does where each of D's pipeline stages would read one and the same stage of P. P is told
    from 0.30 on. Earlier a worker that cannot shake hands reports such a prompt as
    received, which ends a scheduler that does not wait for it.
    """
    state, params = scheduler_state(scheduler), request.kv_transfer_params
    stages = int(scheduler.vllm_config.parallel_config.pipeline_parallel_size)
    is_staged = stages > 1 and not state.facts.names_regions
    if not (state.has_stock_workers or is_staged) or is_push(scheduler):
        return False
    planned = state.of(read_request.PlannedLoads)
    _, held = read_request.loaded_tokens(scheduler, request, state.facts, planned)
    told = (
        str(params["remote_engine_id"]),
        held,
        read_request.groups(params.get("remote_block_ids") or ()),
    )
    is_kept = is_staged or is_guarded(scheduler, state.equal_peers, *told, state.facts)
    known = state.of(PromptLoads).told
    if is_staged and "stages" not in known:
        known["stages"] = True
        _LOG.warning(
            "prompts are computed here: this engine has %d pipeline stages, and vLLM before 0.30 "
            "has all of them read one and the same stage of P; use --pipeline-parallel-size 1 on "
            "the decode side",
            stages,
        )
    if is_kept and state.facts.failed_loads != "as failed":
        read_request.leave_unread(scheduler, request, state.facts)
    return is_kept


# --- what no release says --------------------------------------------------------------


def _state(worker: Any) -> dict[str, Any]:
    from kvpatch.peer import statement

    ours = held_by(worker, LocalGeometry)
    return {WORDS: statement.words_of(release_worker(worker), ours)}


def _take_statements(scheduler: Any, metadata: Any) -> Any:
    from kvpatch.peer import statement

    scheduler_state(scheduler).has_stock_workers = statement.lack_kvpatch(metadata)
    return statement.with_stated_words(metadata)


def _nixl_handshake(
    wrapped: Wrapped,
    instance: Any,
    host: str,
    port: int,
    remote_tp_size: int,
    expected_engine_id: str,
    *more: Any,
    **named: Any,
) -> Any:
    from kvpatch.peer import statement

    channels = worker_state(instance).of(statement.SideChannels)
    channels.found[expected_engine_id] = Address(host, int(port))
    return wrapped(host, port, remote_tp_size, expected_engine_id, *more, **named)


def _add(found: dict[Site, Wrapper | Step], site: Site, wrapper: Wrapper) -> None:
    """Adds a wrapper, around the one that is there."""
    inner: Any = found.get(site)
    found[site] = wrapper if inner is None else partial(_around, wrapper, inner)


def _around(
    outer: Wrapper, inner: Wrapper, wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any
) -> Any:
    return outer(partial(inner, wrapped, instance), instance, *args, **kwargs)


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    found: dict[Site, Wrapper | Step] = {
        **registration_step(facts),
        seams.add_remote_agent(facts): _add_remote_agent,
        seams.read_blocks_for_req(facts): _read_blocks_for_req,
        seams.add_request(facts): _add_request,
        seams.build_connector_meta(facts): Step(write_step, _attach_reads),
    }
    if not facts.keeps_aborted_blocks:  # <= 0.15
        from kvpatch.legacy import unlike_engines

        found |= unlike_engines.sites(facts)
    if facts.listens_in_scheduler:
        found[seams.get_handshake_metadata(facts)] = Step(write_statement, _state)
        found[seams.set_xfer_handshake_metadata(facts)] = Step(read_statement, _take_statements)
    if facts.reorders_for_cpu:
        found[seams.transfer_results(facts)] = Step(around, Around(before=_note_loads))
        found[seams.reorder_received(facts)] = _reorder_received
    # Around what an old release needs of the same calls.
    if facts.listens_in_scheduler or facts.context_sizes:
        _add(found, seams.get_num_new_matched_tokens(facts), _get_num_new_matched_tokens)
    _add(found, seams.nixl_handshake(facts), _nixl_handshake)
    return found


PATCH = Patch(slug="unlike_engines", wire_affecting=False, sites=_sites, document=__doc__)
