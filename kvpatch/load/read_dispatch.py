"""A request to read from a peer: whose transfers it is read by, or why it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpatch.core.errors import KvpatchError, ReadRefused, UnexpectedRead, UnlikePrompts
from kvpatch.load import read_request
from kvpatch.load.mapped_pages import MappedPages, refuse_unmapped
from kvpatch.load.named_blocks import leave_common_blocks, refuse_misnamed
from kvpatch.load.prepared_transfers import Reading, RequestContext
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.reader import Reader
from kvpatch.load.reordered_loads import ReorderedLoads
from kvpatch.load.smaller_blocks import smaller_blocks
from kvpatch.worker.state import release_worker, worker_state

if TYPE_CHECKING:
    from kvpatch.peer.remote_ranks import Peer


@contextmanager
def request_read(worker: Any, request_id: str, meta: Any) -> Iterator[None]:
    """While inside, the release prepares a request's transfers, and they are what they must be."""
    state = worker_state(worker)
    reader, facts = state.held(Reader), state.facts
    read_request.restore_remote_blocks(meta, facts)
    engine_id, request = read_request.engine_of(meta, facts), read_request.read_request_of(meta)
    smaller = smaller_blocks(worker, engine_id, facts)
    with ExitStack() as inside:
        if reader is not None:
            context = RequestContext(request_id, engine_id)
            if request is not None:
                context.arrived, context.is_read_back = request.arrived, request.is_read_back
                if request.is_read_back:  # else P states null, and typed proxies 0.0
                    context.expires = read_request.stated_end(worker, engine_id, meta, facts)
                if reader.check_makers:
                    changes = _changes_what_is_read(worker, engine_id)
                    context.is_as_read = smaller is None and not changes
                    for check_load in reader.check_makers:
                        check_load(context, request)
                    inside.callback(_end_preparing, worker, context, request)
                parts = reader.ours.kernel_blocks_per_block
                context.check = partial(
                    refuse_unmapped, state.held(MappedPages), reader.groups, request, parts
                )
            inside.enter_context(reader.request(context))
        if smaller is not None:
            from kvpatch.load.smaller_blocks_pairing import Pairing
            from kvpatch.load.smaller_blocks_reading import paired

            groups = release_worker(worker).groups(())
            pairing = Pairing(engine_id, groups, *smaller, facts)
            inside.enter_context(paired(worker, meta, pairing))
        elif reader is not None:
            _take_over(worker, meta, reader, context)
        elif request is not None:
            inside.enter_context(_left_to_release(worker, engine_id, request, meta))
        yield


@contextmanager
def _left_to_release(
    worker: Any, engine_id: str, request: ReadRequest, meta: Any
) -> Iterator[None]:
    """While inside, the release reads what it alone can, of lists that end together."""
    state = worker_state(worker)
    try:
        leave_common_blocks(worker, engine_id, request, meta, state.facts)
    except UnlikePrompts as error:
        state.book.refuse(error)
        read_request.match_local_block_count(meta, state.facts)
        from kvpatch.load.smaller_blocks_reading import refusing

        with refusing(worker, engine_id, error):
            yield
    else:
        yield


def _changes_what_is_read(worker: Any, engine_id: str) -> bool:
    """Whether the release makes its own of a peer's blocks behind the reads, as of smaller ones.

    It permutes those of all peers once it was told to (from 0.11.1), and reorders those of another
    backend for a CPU's (from 0.20).
    """
    permutes = bool(getattr(worker, "enable_permute_local_kv", False))
    return permutes or engine_id in worker_state(worker).of(ReorderedLoads).peers


def _end_preparing(worker: Any, context: RequestContext, request: ReadRequest) -> None:
    is_loaded = any(request.local_blocks) and context.engine_id in worker._remote_agents
    for ended in context.when_prepared:
        ended(is_loaded and context.refusal is None)


def _take_over(worker: Any, meta: Any, reader: Reader, context: RequestContext) -> None:
    """Has a request read by us, or fail, where the release cannot read it."""
    request = read_request.read_request_of(meta)
    facts = worker_state(worker).facts
    try:
        peer = _checked_peer(worker, meta, reader, context)
    except KvpatchError as error:
        read_request.match_local_block_count(meta, facts)
        context.refusal = error
        return
    # Else one like us; or one that hands are shaken with now (from 0.32), and the request
    # comes again; or a full prefix hit or an abort, of which the release tells P.
    if peer is not None and request is not None and any(request.local_blocks):
        read_request.match_local_block_count(meta, facts)
        context.reading = Reading(peer, request)


def _checked_peer(worker: Any, meta: Any, reader: Reader, context: RequestContext) -> Peer | None:
    """The peer that the request is read from, where it is of another geometry.

    Raises:
        KvpatchError: neither the release nor we can read the request.
    """
    engine_id, request = context.engine_id, read_request.read_request_of(meta)
    peer = reader.peer(engine_id)
    if peer is not None:  # its blocks are paired by token, which tells wrong ones
        if request is None:
            raise ReadRefused(
                f"request {context.request_id} reads from engine {engine_id} of another geometry "
                "and carries no token count",
                "set ENABLE_KVPATCH for the scheduler's process too",
            )
        return peer
    fills = request is not None and any(request.local_blocks)
    is_known, state = engine_id in worker._remote_agents, worker_state(worker)
    if is_known and state.is_host_buffered and fills:
        raise UnexpectedRead(
            f"request {context.request_id} reads from engine {engine_id}, which has not shaken "
            "hands with the host buffer's reader"
        )
    if request is not None:
        leave_common_blocks(worker, engine_id, request, meta, state.facts)
    refuse_misnamed(worker, reader, engine_id, meta, state.facts)
    return None
