"""A decode engine reads from a prefill engine of another block size or layout.

Why:
    The connector copies blocks as opaque runs of bytes. A prefill engine with
    larger blocks is refused at the first request (``Local block size 32 is not
    divisible by remote block size 128``), one with an NHD cache at the
    handshake; smaller prefill blocks are read wrongly, without an error, where
    the last block is partial and there is a prefix hit, where K and V are packed
    in HND (0.26 to 0.31), and wherever the CPU backend stores keys by column.
    0.11.1 and 0.11.2 fail every handshake of a decode engine that cuts its blocks
    into kernel blocks, and on a CPU they take the number of heads for the block size.
    To 0.13 a prefill engine of more ranks fails every handshake, and on most releases pairs
    of unlike ranks do where there are more ranks than KV heads on either side.
Where:
    D's scheduler and worker. P needs nothing.
How:
    At the handshake D works out where each of P's layers, heads and tokens lies,
    and shows the release a peer like itself, within the memory that P registered.
    The release goes on to keep its books, notify and complete as ever; the one
    transfer that it prepares for a request is replaced by the byte runs between
    the two geometries, paired by token position. Like pairs are left to it. To 0.13 D
    shakes hands with one rank of P alone: of a P with more ranks than D's it is led to
    each that it needs, one after the other, and a request's reads from all are one to it.
Upstream:
    vLLM #26744 and #30448, closed; #52234 and #42895 ask for it.
Limits:
    To 0.11.0 the handshake states no block size: D computes prompts itself until one of three
    of P's blocks or more has told it, for peers like D too, and 0.10.0 states no layout either:
    there D's worker reads a few of P's blocks of such a prompt as well, and P is read in the
    layout under which they are near to what D has computed, and much nearer than under the
    other; nothing is loaded from a P of which that is not so. What ends behind P's whole blocks
    D computes there, and with a draft model every prompt. From 0.11.1 to 0.20 it does not state
    how blocks are cut: where a backend may have cut them (FlashInfer, FlashMLA), a prompt has
    to tell it too, of peers like D as well; D computes shorter ones before it (to 0.16 by the
    default ``kv_load_failure_policy``). Of models of windows alone P names as many blocks as a
    window touches, which tells less: D may compute many prompts first.
    To 0.13 the ranks of a P with more than D are a multiple of D's.
    Refused are keys that AMX tiles, and to 0.25 models of windows alone, or of groups of unlike
    shapes, with a draft model; such groups need one tensor-parallel size.
    Of several cache groups a P in BLNHC or BHLNC
    (0.29 on), whose blocks are rows of all layers, is refused, and so are padded rows. A
    D with vLLM's own host buffer, shared KV layers or context parallelism
    leaves unlike peers to the release. Of smaller blocks, which it pairs with wrong tokens behind
    a prefix hit, it is handed those that it pairs rightly; a request that has no such blocks fails
    alone. A peer of smaller blocks is refused where the release misreads each of its requests
    (keys by column; heads, 0.23 to 0.31, or in NHD).
    Recurrent state (Mamba) is read whole from as many ranks as D's and of as many bytes;
    between plain pools unlike ranks are left to the release. To 0.20, where a backend may have
    cut them, a plain pool of other blocks is refused.
Remove when:
    The connector reads any block size and layout, prefix hits included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from kvpatch import _env
from kvpatch._errors import KvpatchError, RegistrationRefused
from kvpatch._patching import Patch, Site
from kvpatch._versions import GENERATIONS, Generation
from kvpatch.patches import _sites
from kvpatch.vllm import orders
from kvpatch.vllm.admission import (
    add_unlike,
    add_unproven,
    have_our_parts,
    is_left_with_state,
    refuse_doubtful_layout,
    refuse_uncounted,
)
from kvpatch.vllm.agent import ReadingAgent
from kvpatch.vllm.groups import counted_group
from kvpatch.vllm.handles import agents_beside, ranks_of, unlike_engine_of
from kvpatch.vllm.head_shares import SharesRead
from kvpatch.vllm.host_buffer_links import connectors_of
from kvpatch.vllm.host_buffer_worker import buffer_of, is_on
from kvpatch.vllm.introducing import introductions_of, introductions_to_cuts
from kvpatch.vllm.kvcached_pages import refuse_unmapped
from kvpatch.vllm.likeness import (
    completed,
    has_two_layouts,
    is_alike,
    refuse_drafted_windows,
    refuse_endless,
    refuse_unreadable,
)
from kvpatch.vllm.misread_blocks import take_planned_blocks, takes_heads_for_tokens
from kvpatch.vllm.named_blocks import refuse_misnamed
from kvpatch.vllm.own_cache import (
    are_in_regions,
    has_blocks_of,
    has_both_in_blocks,
    is_plain,
    read_cache,
    read_states,
    reader_for,
)
from kvpatch.vllm.proofs import announced
from kvpatch.vllm.ranks import AskingOneRank, Met, ranks_to_read
from kvpatch.vllm.reader import Peer, Reader, attach, reader_of
from kvpatch.vllm.registration import REGISTRATIONS, Registration
from kvpatch.vllm.rows import rows_of
from kvpatch.vllm.shares import ReadRefused
from kvpatch.vllm.smaller_blocks import admit_smaller, paired, smaller_blocks
from kvpatch.vllm.split_handles import watch_split_handles
from kvpatch.vllm.states import StatePages
from kvpatch.vllm.unstated import (
    Introductions,
)
from kvpatch.vllm.wire import PeerRefused, read_statement

_LOG = logging.getLogger("kvpatch.unlike_engines")


def _register_kv_caches(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    registration: Registration,
    meets_one_rank: bool,
    shares_read: SharesRead,
    misreads_blocks: bool,
) -> Any:
    def register(kv_caches: Mapping[str, Any]) -> Any:
        # Read first: what registering makes of split tensors is not what they are.
        cache = read_cache(registration, instance, kv_caches, leave_state=True)
        buffer = buffer_of(instance)
        states: Mapping[str, StatePages] = {}
        if cache is not None and len(cache[0]) < len(kv_caches):
            states = read_states(instance, kv_caches, cache)
            cache = cache if states and buffer is None else None
        behind = cache if buffer is None else read_cache(registration, instance, buffer.tensors)
        # So is this: that its own blocks are no longer keys first is what registering may make
        # the worker believe.
        blocks_hold_both = cache is not None and has_both_in_blocks(registration, instance, cache)
        result = wrapped(kv_caches)
        is_misread = False
        if misreads_blocks and cache is not None:
            is_misread = takes_heads_for_tokens(instance, cache[0])
        if is_misread:
            take_planned_blocks(instance)
        rows = rows_of(instance)
        can_read = (
            cache is not None
            and is_plain(instance)
            and has_blocks_of(instance.block_size, cache)
            and (rows is not None or not states or are_in_regions(instance, states))
        )
        if rows is not None and not can_read:
            raise RegistrationRefused(
                "kvcached's contiguous layout cannot be read into here (context parallelism, "
                "vLLM's own host buffer, kernel blocks smaller than the tensors', or recurrent "
                "states that are not one behind the other): set KVCACHED_CONTIGUOUS_LAYOUT=false"
            )
        if can_read and cache is not None and behind is not None:
            agent = own_agent(instance.nixl_wrapper)
            reader = reader_for(
                instance,
                agent,
                kv_caches,
                cache,
                behind[0],
                blocks_hold_both=blocks_hold_both,
                meets_one_rank=meets_one_rank,
                shares_read=shares_read,
                misreads_blocks=is_misread,
                states=states,
            )
            attach(instance, reader)
            instance.nixl_wrapper = ReadingAgent(
                agent,
                reader,
                partial(ranks_of, instance),
                partial(unlike_engine_of, instance),
                partial(agents_beside, instance),
            )
            watch_split_handles(instance)
            registration.admit_peers(instance)
        return result

    return register(*args, **kwargs)


def own_agent(agent: Any) -> Any:
    """NIXL's own agent, where the worker has registered before."""
    return agent.__wrapped__ if isinstance(agent, ReadingAgent) else agent


def _add_remote_agent(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    registration: Registration,
    drafted_windows: bool,
    states_layout: bool,
    takes_heads_for_hnd: bool,
) -> Any:
    admit = partial(
        admit_smaller, registration=registration, takes_heads_for_hnd=takes_heads_for_hnd
    )

    def as_release(metadata: Any, *more: Any) -> Any:
        refuse_endless(instance, metadata)
        return wrapped(metadata, *more)

    def add(
        nixl_agent_meta: Any, remote_tp_rank: int = 0, remote_tp_size: int = 1, *more: Any
    ) -> Any:
        # More is the peer's context-parallel size, by place, from 0.29.
        if not hasattr(instance, "_read_blocks_for_req"):  # push mode: P writes
            return as_release(nixl_agent_meta, remote_tp_rank, remote_tp_size, *more)
        reader = reader_of(instance)
        if reader is None:
            if is_on(instance):
                raise PeerRefused(
                    f"engine {nixl_agent_meta.engine_id} cannot be read: this engine's cache is "
                    "not one that kvpatch reads into (keys in tiles, context parallelism), and its "
                    "host buffer needs that; use KVPATCH_HOST_BUFFER=never"
                )
            if registration.key_order(instance) is None:
                peer = read_statement(nixl_agent_meta, remote_tp_rank, remote_tp_size)
                refuse_unreadable(instance, peer)
            else:
                admit(instance, nixl_agent_meta)
            return as_release(nixl_agent_meta, remote_tp_rank, remote_tp_size, *more)
        stated = read_statement(nixl_agent_meta, remote_tp_rank, remote_tp_size)
        if is_left_with_state(reader, stated):
            admit(instance, nixl_agent_meta)
            return as_release(nixl_agent_meta, remote_tp_rank, remote_tp_size, *more)
        misread = reader.ours.misreads_blocks
        peer, unstated = completed(
            reader.ours, replace(stated, block_tokens=None) if misread else stated
        )
        refuse_doubtful_layout(instance, reader, peer)
        if has_two_layouts(reader.ours, peer):
            if _env.unstated_layout() == "prove":
                metadata = nixl_agent_meta
                return add_unproven(as_release, instance, reader, metadata, peer, unstated)
            if not is_alike(reader.ours, peer):
                peer = replace(peer, layout=reader.ours.inner_layout)
        is_like = is_alike(reader.ours, peer) and not (reader.is_for_all or misread)
        if reader.has_state:
            if is_like:
                have_our_parts(instance, reader.ours, peer)
            else:
                refuse_uncounted(reader.ours, peer, unstated)
        if is_like:
            rank = reader.admit_like(peer, unstated)
            agent = as_release(nixl_agent_meta, remote_tp_rank, remote_tp_size, *more)
            if rank is not None:
                rank.agent = agent
        else:
            if drafted_windows:
                refuse_drafted_windows(instance, reader.ours, reader.groups, peer)
            agent = add_unlike(as_release, instance, reader, nixl_agent_meta, peer, unstated, more)
        if not states_layout:
            reader.proofs.settle(peer.engine_id)
        return agent

    return add(*args, **kwargs)


def _nixl_handshake(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def handshake(
        host: str, port: int, remote_tp_size: int, expected_engine_id: str
    ) -> dict[int, str]:
        asked = host, port, remote_tp_size, expected_engine_id
        worker = instance
        is_asking = isinstance(worker, AskingOneRank)
        if is_asking or reader_of(worker) is None or remote_tp_size <= worker.world_size:
            return wrapped(*asked)  # type: ignore[no-any-return]
        ranks = ranks_to_read(worker.tp_rank, worker.world_size, remote_tp_size)
        if ranks is None:
            raise PeerRefused(
                f"engine {expected_engine_id} cannot be read: it has {remote_tp_size} tensor-"
                f"parallel ranks and we have {worker.world_size}: use a --tensor-parallel-size on "
                "the prefill side that is a multiple of the decode side's"
            )
        met = Met()
        for rank in ranks:
            known = worker.dst_xfer_side_handles.pop(expected_engine_id, None)
            if known is not None:  # of the rank before: the release keeps one, ours need none
                worker.nixl_wrapper.release_dlist_handle(known)
            asking = AskingOneRank(worker, rank, remote_tp_size)
            met.update(type(worker)._nixl_handshake(asking, *asked))
        return met

    return handshake(*args, **kwargs)


def _read_blocks_for_req(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    expanded: bool,
    registration: Registration,
) -> Any:
    def read(req_id: str, meta: Any) -> Any:
        reader = reader_of(instance)
        orders.stop_pretending(meta)
        engine_id = orders.engine_of(meta)
        smaller = smaller_blocks(instance, engine_id)
        if smaller is not None:
            with paired(instance, meta, registration.groups(instance, ()), *smaller):
                return wrapped(req_id, meta)
        if reader is None:
            return wrapped(req_id, meta)
        order = orders.order_of(meta)
        try:
            peer = _peer_of(reader, engine_id, order)
            if any(orders.groups(meta.local_block_ids)):
                reader.proofs.check(engine_id)
            _check_order(instance, req_id, engine_id, peer, order)
            if peer is None:  # others are paired by token, which tells
                refuse_misnamed(instance, reader, engine_id, meta, expanded=expanded)
        except KvpatchError as error:
            orders.pretend_alike(meta, expanded=expanded)
            with reader.refusing(engine_id, error):
                return wrapped(req_id, meta)
        if order is not None and reader.proofs.is_open(engine_id):  # D computes it
            with reader.proofs.sampling(req_id, engine_id, order):
                return wrapped(req_id, meta)
        if peer is None or order is None or not any(order.local_blocks):
            # One like us; or one that hands are shaken with now (from 0.32), and the request
            # comes again; or a full prefix hit or an abort, of which the release tells P.
            return wrapped(req_id, meta)
        orders.pretend_alike(meta, expanded=expanded)
        with reader.reading(req_id, engine_id, peer, order):
            return wrapped(req_id, meta)

    def read_checked(req_id: str, meta: Any) -> Any:
        reader, order = reader_of(instance), orders.order_of(meta)
        if reader is None or order is None:
            return read(req_id, meta)
        parts = reader.ours.kernel_blocks_per_block
        with reader.filling(partial(refuse_unmapped, instance, reader.groups, order, parts)):
            return read(req_id, meta)

    return read_checked(*args, **kwargs)


def _peer_of(reader: Reader, engine_id: str, order: orders.Order | None) -> Peer | None:
    return reader.peer(engine_id) if order is None else reader.peer_for(engine_id, order)


def _check_order(
    worker: Any, req_id: str, engine_id: str, peer: Peer | None, order: orders.Order | None
) -> None:
    """Refuses what neither the release nor we can read.

    Raises:
        ReadRefused: a host buffer's peer that its reader has not met, or no token count.
    """
    if peer is not None:
        if order is None:
            raise ReadRefused(
                f"request {req_id} reads from engine {engine_id} of another geometry and carries "
                "no token count: set ENABLE_KVPATCH for the scheduler's process too"
            )
        return
    is_known = engine_id in worker._remote_agents
    if is_known and is_on(worker) and order is not None and any(order.local_blocks):
        raise ReadRefused(
            f"request {req_id} reads from engine {engine_id}, which has not shaken hands "
            "with the host buffer's reader"
        )


_INTRODUCTIONS: WeakKeyDictionary[Any, Introductions] = WeakKeyDictionary()


def _get_num_new_matched_tokens(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    introduce: Callable[[Any], Introductions | None],
) -> Any:
    def matched(request: Any, num_computed_tokens: int) -> Any:
        found = wrapped(request, num_computed_tokens)
        parameters = request.kv_transfer_params or {}
        engine_id, blocks = (parameters.get(f"remote_{key}") for key in ("engine_id", "block_ids"))
        if not found[0] or engine_id is None or blocks is None:
            return found
        groups = blocks if blocks and isinstance(blocks[0], list | tuple) else [blocks]
        introductions = _INTRODUCTIONS.get(instance) or introduce(instance)
        counted = counted_group(instance)
        if introductions is None or counted is None:
            return found
        _INTRODUCTIONS[instance] = introductions
        needed = num_computed_tokens + found[0]
        held = len(groups[counted]) if counted < len(groups) else 0
        tokens = orders.prefilled_tokens(instance, request)
        if introductions.allow(engine_id, tokens, held, needed):
            return found
        return 0, False

    return matched(*args, **kwargs)


def _build_connector_meta(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    full_blocks_only: bool,
    drafted_blocks: bool,
) -> Any:
    waiting = dict(instance._reqs_need_recv)
    metadata = wrapped(*args, **kwargs)
    orders.attach_orders(
        instance,
        waiting,
        metadata,
        full_blocks_only=full_blocks_only,
        drafted_blocks=drafted_blocks,
        step=_step(*args, **kwargs) if full_blocks_only else None,
    )
    return metadata


def _step(scheduler_output: Any) -> Any:
    """The scheduler's output, by place or by name."""
    return scheduler_output


def _get_finished(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def get_finished(finished_req_ids: set[str]) -> Any:
        worker = instance.connector_worker
        reader = reader_of(worker) if worker is not None else None
        if reader is None:
            return wrapped(finished_req_ids)
        reader.given_up.end(worker, finished_req_ids)
        news = reader.proofs.end_step()
        sent, received = wrapped(finished_req_ids)
        return sent, news | reader.given_up.report(worker, received or ())

    return get_finished(*args, **kwargs)


def _start_load_kv(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def start(metadata: Any) -> Any:
        reader = reader_of(instance)
        if reader is not None:
            found = orders.orders_of(metadata)
            reader.given_up.begin({name: order for name, order in found if any(order.local_blocks)})
            for request_id, order in found:
                if order.computed is not None:
                    engine_id = orders.engine_of(metadata.reqs_to_recv[request_id])
                    reader.proofs.computing(request_id, engine_id, order)
        return wrapped(metadata)

    return start(*args, **kwargs)


def _update_from_kv_xfer_finished(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def update(output: Any) -> Any:
        news = announced(output.finished_recving or ())
        for connector in connectors_of(instance) if news else ():
            introductions = _INTRODUCTIONS.get(connector.connector_scheduler)
            if introductions is not None:
                for engine_id in news.values():
                    introductions.prove(engine_id)
        if news:  # which are no requests
            output.finished_recving = set(output.finished_recving) - news.keys()
        return wrapped(output)

    return update(*args, *kwargs.values())


def _sites_of_introductions(generation: Generation) -> dict[Site, Any]:
    """To 0.11.0 a handshake states no block size, and no single load can fail.

    To 0.20 it does not state how blocks are cut; to 0.16 D computes what fails, of itself.
    """
    introduce: Any
    if generation.slug in _NO_BLOCK_SIZE:
        introduce = partial(introductions_of, full_blocks_only=generation.slug in _WHOLE_BLOCKS)
    elif generation.slug in _FAILING_CUTS:
        introduce = partial(introductions_to_cuts, module=generation.worker_module)
    else:
        return {}
    return {
        _sites.scheduler_matched_tokens(generation): partial(
            _get_num_new_matched_tokens, introduce=introduce
        )
    }


def _sites_of_handshakes(generation: Generation) -> dict[Site, Any]:
    """To 0.13 a worker shakes hands with one rank of its peer, and not where it has more."""
    if generation.slug not in _MEETS_ONE_RANK:
        return {}
    return {_sites.nixl_handshake(generation): _nixl_handshake}


def _sites_of_aborts(generation: Generation) -> dict[Site, Any]:
    """To 0.15 the blocks of an aborted request are free at once, its read or not."""
    if generation.slug not in _ABORTS:
        return {}
    return {
        _sites.start_load_kv(generation): _start_load_kv,
        _sites.get_finished(generation): _get_finished,
    }


def _sites_of_proofs(generation: Generation) -> dict[Site, Any]:
    """0.10.0 states no layout, and its scheduler hears of nothing but received requests."""
    if generation.slug not in _NO_LAYOUT:
        return {}
    return {
        _sites.update_from_kv_xfer_finished(generation): _update_from_kv_xfer_finished,
    }


_ABORTS = ("g0100", "g0101", "g0102", "g0110", "g0111", "g0130", "g0140")
_MEETS_ONE_RANK = ("g0100", "g0101", "g0102", "g0110", "g0111", "g0130")
_COUNTS_ONE_HEAD = (*_MEETS_ONE_RANK, "g0140", "g0160", "g0180")
# What it makes of heads in larger blocks than P's; 0.32 asks what the layout is.
_TAKES_HEADS_FOR_HND = (*_COUNTS_ONE_HEAD, "g0200")
_READS_ITS_SHARE = ("g0240", "g0260", "g0290", "g0300")
# 0.11.1 and 0.11.2, on a CPU backend; 0.12.0 does not.
_MISREADS_BLOCKS = ("g0111",)
# 0.17 to 0.20; 0.21 and 0.22 state how blocks are cut.
_FAILING_CUTS = ("g0160", "g0180", "g0200")
_NO_BLOCK_SIZE = ("g0100", "g0101", "g0102", "g0110")
# 0.10.0 asks for whole blocks only.
_WHOLE_BLOCKS = ("g0100",)
_NO_LAYOUT = ("g0100",)
# 0.23 to 0.25 reserve slots for drafted tokens while a request is loaded.
_DRAFTED_BLOCKS = ("g0230", "g0240")
# To 0.24 a list of P's goes on behind the prompt where it drafts tokens (0.25 ends g0240).
_DRAFTED_WINDOWS = ("g0180", "g0200", "g0230", "g0240")
# Up to 0.19 both lists are expanded to kernel blocks before the request is read.
_EXPANDED = ("g0111", "g0130", "g0140", "g0160", "g0180")

PATCH = Patch(
    slug="unlike_engines",
    wire_affecting=False,
    sites={
        g.slug: {
            _sites.register_kv_caches(g): partial(
                _register_kv_caches,
                registration=REGISTRATIONS[g.slug],
                meets_one_rank=g.slug in _MEETS_ONE_RANK,
                shares_read=SharesRead(
                    counts_one_head=g.slug in _COUNTS_ONE_HEAD,
                    reads_its_share=g.slug in _READS_ITS_SHARE,
                ),
                misreads_blocks=g.slug in _MISREADS_BLOCKS,
            ),
            _sites.add_remote_agent(g): partial(
                _add_remote_agent,
                registration=REGISTRATIONS[g.slug],
                drafted_windows=g.slug in _DRAFTED_WINDOWS,
                states_layout=g.slug not in _NO_LAYOUT,
                takes_heads_for_hnd=g.slug in _TAKES_HEADS_FOR_HND,
            ),
            _sites.read_blocks_for_req(g): partial(
                _read_blocks_for_req,
                expanded=g.slug in _EXPANDED,
                registration=REGISTRATIONS[g.slug],
            ),
            _sites.build_connector_meta(g): partial(
                _build_connector_meta,
                full_blocks_only=g.slug in _WHOLE_BLOCKS,
                drafted_blocks=g.slug in _DRAFTED_BLOCKS,
            ),
            **_sites_of_introductions(g),
            **_sites_of_handshakes(g),
            **_sites_of_aborts(g),
            **_sites_of_proofs(g),
        }
        for g in GENERATIONS
    },
    not_needed={},
    document=__doc__,
)
