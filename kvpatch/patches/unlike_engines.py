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
    To 0.20 the handshake does not say all of a block: the data type to 0.11.0, the layout on
    0.10.0, and then how blocks are cut, where a backend may cut them (FlashInfer, FlashMLA).
    There D computes the first prompt of a P itself, of one like it too, reads some of what P's
    blocks hold of it, and loads later ones once they have shown the rest; nothing is loaded
    from a P that holds something else. A P whose cut blocks' null block is not all zeros, or
    a model whose keys and values do not depend on a token's place, is not told apart.
    ``KVPATCH_PEER_BLOCK_SIZE`` (and ``KVPATCH_PEER_LAYOUT``) leave the proof out. On 0.10.0 what
    ends behind P's whole blocks D computes, and with a draft model every prompt.
    To 0.13 the ranks of a P with more than D are a multiple of D's.
    Refused are keys that AMX tiles, and to 0.24 models of windows alone, or of groups of unlike
    shapes, with a draft model; such groups need one tensor-parallel size.
    Of several cache groups a P in BLNHC or BHLNC
    (0.29 on), whose blocks are rows of all layers, is refused, and so are padded rows. A
    D with vLLM's own host buffer, shared KV layers or context parallelism
    leaves unlike peers to the release. Of smaller blocks, which it pairs with wrong tokens behind
    a prefix hit, it is handed those that it pairs rightly; a request that has no such blocks fails
    alone. A peer of smaller blocks is refused where the release misreads each of its requests
    (keys by column; heads, 0.23 to 0.31, or in NHD).
    Recurrent state (Mamba) is read whole from as many ranks as D's and of as many bytes;
    between plain pools unlike ranks are left to the release.
Remove when:
    The connector reads any block size and layout, prefix hits included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kvpatch.core import seams
from kvpatch.core.errors import KvpatchError
from kvpatch.core.ledger import Patch, Site, Step, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.vllm import orders
from kvpatch.vllm.admission import (
    add_unlike,
    add_unproven,
    have_our_parts,
    is_left_with_state,
    refuse_doubtful_layout,
)
from kvpatch.vllm.announcements import announced
from kvpatch.vllm.candidates import candidates_of
from kvpatch.vllm.introducing import (
    book_proof,
    hear_what_is_open,
    introductions_of,
)
from kvpatch.vllm.kvcached_pages import refuse_unmapped
from kvpatch.vllm.likeness import (
    is_alike,
    refuse_drafted_windows,
    refuse_endless,
    refuse_unreadable,
)
from kvpatch.vllm.named_blocks import refuse_misnamed
from kvpatch.vllm.ranks import AskingOneRank, Met, ranks_to_read
from kvpatch.vllm.reader import Peer
from kvpatch.vllm.registering import registration_step
from kvpatch.vllm.registration import registration_of
from kvpatch.vllm.shares import ReadRefused
from kvpatch.vllm.smaller_blocks import admit_smaller, paired, smaller_blocks
from kvpatch.vllm.state import connectors_of, scheduler_state, worker_state
from kvpatch.vllm.whole_blocks import refuse_cut_unread
from kvpatch.vllm.wire import PeerRefused, Statement, read_statement


def _add_remote_agent(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    facts: ReleaseFacts,
) -> Any:
    registration = registration_of(facts)
    admit = partial(admit_smaller, registration=registration, facts=facts)

    state = worker_state(instance)

    def as_release(metadata: Any, *more: Any) -> Any:
        refuse_endless(instance, metadata)
        return wrapped(metadata, *more)

    def add(
        nixl_agent_meta: Any, remote_tp_rank: int = 0, remote_tp_size: int = 1, *more: Any
    ) -> Any:
        # More is the peer's context-parallel size, by place, from 0.29.
        def left_to_the_release(*handed: Any) -> Any:
            agent = as_release(*handed)
            if not facts.states_kernel_blocks:  # nobody here would ever prove anything
                state.announcements.settle(nixl_agent_meta.engine_id)
            return agent

        if not hasattr(instance, "_read_blocks_for_req"):  # push mode: P writes
            return as_release(nixl_agent_meta, remote_tp_rank, remote_tp_size, *more)
        reader = state.reader
        if reader is None:
            if state.is_host_buffered:
                raise PeerRefused(
                    f"engine {nixl_agent_meta.engine_id} cannot be read: this engine's cache is "
                    "not one that kvpatch reads into (keys in tiles, context parallelism), and its "
                    "host buffer needs that; use KVPATCH_HOST_BUFFER=never"
                )
            if registration.key_order(instance) is None:
                peer = read_statement(nixl_agent_meta, remote_tp_rank, remote_tp_size)
                refuse_unreadable(instance, peer)
            else:
                refuse_cut_unread(instance, nixl_agent_meta, remote_tp_size)
                admit(instance, nixl_agent_meta)
            return left_to_the_release(nixl_agent_meta, remote_tp_rank, remote_tp_size, *more)
        stated = read_statement(nixl_agent_meta, remote_tp_rank, remote_tp_size)
        # Both grow in other threads; what is on its way is a future.
        booked = (*tuple(instance._remote_agents), *tuple(instance._handshake_futures))
        reader.keep((*booked, stated.engine_id))
        if is_left_with_state(reader, stated):
            admit(instance, nixl_agent_meta)
            return left_to_the_release(nixl_agent_meta, remote_tp_rank, remote_tp_size, *more)
        ours = reader.ours
        misread = ours.misreads_blocks
        found = candidates_of(ours, replace(stated, block_tokens=None) if misread else stated)
        peer = found.statements[0]
        refuse_doubtful_layout(instance, reader, peer)

        def check(statement: Statement) -> None:
            if facts.has_cache_groups and facts.lists_drafted_blocks:
                refuse_drafted_windows(instance, ours, reader.groups, statement)

        if found.is_open:
            statements = found.statements
            return add_unproven(as_release, instance, reader, nixl_agent_meta, statements, check)
        if is_alike(ours, peer) and not reader.reads_all:
            if reader.has_state:
                have_our_parts(instance, ours, peer)
            reader.admit_like(peer.engine_id)
            agent = as_release(nixl_agent_meta, remote_tp_rank, remote_tp_size, *more)
        else:
            check(peer)
            agent = add_unlike(as_release, instance, reader, nixl_agent_meta, peer, more)
        if not facts.states_kernel_blocks:
            reader.proofs.settle(peer.engine_id, _block_tokens(peer))
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
        if is_asking or worker_state(worker).reader is None or remote_tp_size <= worker.world_size:
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
    facts: ReleaseFacts,
) -> Any:
    registration = registration_of(facts)
    expanded = facts.expands_remote_blocks

    state = worker_state(instance)

    def read(req_id: str, meta: Any) -> Any:
        reader = state.reader
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
            peer = reader.peer(engine_id)
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
        reader, order = state.reader, orders.order_of(meta)
        if reader is None or order is None:
            return read(req_id, meta)
        parts = reader.ours.kernel_blocks_per_block
        with reader.filling(partial(refuse_unmapped, state.pages, reader.groups, order, parts)):
            return read(req_id, meta)

    return read_checked(*args, **kwargs)


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
    if (
        is_known
        and worker_state(worker).is_host_buffered
        and order is not None
        and any(order.local_blocks)
    ):
        raise ReadRefused(
            f"request {req_id} reads from engine {engine_id}, which has not shaken hands "
            "with the host buffer's reader"
        )


def _get_num_new_matched_tokens(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    facts: ReleaseFacts,
) -> Any:
    def matched(request: Any, num_computed_tokens: int) -> Any:
        found = wrapped(request, num_computed_tokens)
        parameters = request.kv_transfer_params or {}
        engine_id, blocks = (parameters.get(f"remote_{key}") for key in ("engine_id", "block_ids"))
        if not found[0] or not isinstance(engine_id, str) or not isinstance(blocks, list | tuple):
            return found
        introductions = introductions_of(instance, facts)
        if introductions is None:
            return found
        held = max((len(group) for group in orders.groups(blocks)), default=0)
        if introductions.allow(engine_id, held, num_computed_tokens + found[0]):
            return found
        return 0, False

    return matched(*args, **kwargs)


def _set_xfer_handshake_metadata(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def set_metadata(metadata: Mapping[int, Any]) -> Any:
        hear_what_is_open(instance, metadata.values())
        return wrapped(metadata)

    return set_metadata(*args, **kwargs)


def _build_connector_meta(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    facts: ReleaseFacts,
) -> Any:
    waiting = dict(instance._reqs_need_recv)
    metadata = wrapped(*args, **kwargs)
    orders.attach_orders(
        instance,
        waiting,
        metadata,
        facts,
        like_peers=scheduler_state(instance).like_peers,
        step=None if facts.states_kernel_blocks else _step(*args, **kwargs),
    )
    return metadata


def _step(scheduler_output: Any) -> Any:
    """The scheduler's output, by place or by name."""
    return scheduler_output


def _get_finished(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    facts: ReleaseFacts,
) -> Any:
    def get_finished(finished_req_ids: set[str]) -> Any:
        worker = instance.connector_worker
        state = None if worker is None else worker_state(worker)
        reader = None if state is None else state.reader
        if reader is not None:
            if not facts.keeps_aborted_blocks:
                reader.given_up.end(worker, finished_req_ids)
            reader.proofs.end_step()
        sent, received = wrapped(finished_req_ids)
        if reader is not None and not facts.keeps_aborted_blocks:
            received = reader.given_up.report(worker, received or ())
        if state is not None:
            received = state.announcements.received(received, finished_req_ids)
        return sent, received

    return get_finished(*args, **kwargs)


def _start_load_kv(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    facts: ReleaseFacts,
) -> Any:
    def start(metadata: Any) -> Any:
        state = worker_state(instance)
        reader, announcements = state.reader, state.announcements
        found = orders.orders_of(metadata)
        if reader is not None and not facts.keeps_aborted_blocks:
            reader.given_up.begin({name: order for name, order in found if any(order.local_blocks)})
        for request_id, order in found:
            announcements.listen()
            if not any(order.local_blocks):
                announcements.compute(request_id)
            if reader is not None and order.computed is not None:
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
            for engine_id, block_tokens in news.values():
                book_proof(connector.connector_scheduler, engine_id, block_tokens)
        if news:  # which are no requests
            output.finished_recving = set(output.finished_recving) - news.keys()
        return wrapped(output)

    return update(*args, *kwargs.values())


def _block_tokens(peer: Statement) -> int:
    """Of one of the blocks that its ids count; 0 where that is not known."""
    return (peer.block_tokens or 0) * (peer.kernel_blocks_per_block or 1)


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    return {
        **registration_step(facts),
        seams.add_remote_agent(facts): partial(_add_remote_agent, facts=facts),
        seams.read_blocks_for_req(facts): partial(_read_blocks_for_req, facts=facts),
        seams.build_connector_meta(facts): partial(_build_connector_meta, facts=facts),
        **_sites_of_handshakes(facts),
        **_sites_of_proofs(facts),
    }


def _sites_of_handshakes(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    """In releases <= 0.13 a worker shakes hands with one rank of its peer alone."""
    return {seams.nixl_handshake(facts): _nixl_handshake} if facts.meets_one_rank else {}


def _sites_of_proofs(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    """In releases <= 0.20 a handshake does not say all of a block: D finds it out by content."""
    if facts.states_kernel_blocks:
        return {}
    found: dict[Site, Wrapper] = {
        seams.scheduler_matched_tokens(facts): partial(_get_num_new_matched_tokens, facts=facts),
        seams.start_load_kv(facts): partial(_start_load_kv, facts=facts),
        seams.update_from_kv_xfer_finished(facts): _update_from_kv_xfer_finished,
        seams.get_finished(facts): partial(_get_finished, facts=facts),
    }
    if facts.states_block_size:
        found[seams.set_xfer_handshake_metadata(facts)] = _set_xfer_handshake_metadata
    return found


PATCH = Patch(slug="unlike_engines", wire_affecting=False, sites=_sites, document=__doc__)
