"""The wrappers of ``unlike_engines`` that only old releases need.

================  ========================================================  ======================
release           it                                                        here
================  ========================================================  ======================
``<= 0.15``       hands out the blocks of an aborted request at once        ``AbortedReads``
``<= 0.13``       shakes hands with one rank of P                           ``_nixl_handshake``
``<= 0.11.0``     answers handshakes in each worker                         ``words_in_answers``
``<= 0.11.0``     cannot fail a load that comes too late                    ``_loaded_in_time``
``0.10.0``        loads whole blocks, and one more for drafted tokens       ``_whole_blocks``
================  ========================================================  ======================
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary, ref

from kvpatch.core import seams, settings
from kvpatch.core.errors import PeerRefused
from kvpatch.core.ledger import Site, Step, Wrapped, Wrapper
from kvpatch.core.proxies import ObjectProxy
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.load import read_request
from kvpatch.load.prompt_hashes import read_prompt
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.reader import Reader
from kvpatch.load.reader_attachment import InspectedCaches, can_read, leases_of
from kvpatch.load.registration import registration_step
from kvpatch.peer.cross_layer_blocks import listener_told
from kvpatch.peer.statement import with_names, words_of
from kvpatch.transfer.nixl import errors_of
from kvpatch.transfer.own_read import OwnRead
from kvpatch.worker.kv_cache_groups import reserves_slots
from kvpatch.worker.local_geometry import local_geometry_of
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import connector_scheduler, scheduler_state, worker_state
from kvpatch.worker.unpatched_workers import is_applied

_STALE_LOG = logging.getLogger("kvpatch.stale_blocks")
_LOG = logging.getLogger("kvpatch.unlike_engines")


def words_in_answers(release: ReleaseWorker, own: InspectedCaches) -> AbstractContextManager[None]:
    """Adds P's statement to the answers of a worker that starts to answer, while inside."""
    cache = own.cache if can_read(release, own) else None
    # The thread that answers handshakes never ends, and is not to keep the worker.
    this_worker, facts = ref(release.worker), release.facts

    def restate(metadata: Any) -> Any:
        asked = ReleaseWorker(this_worker(), facts)
        ours = None if cache is None else local_geometry_of(asked, cache[0], cache[2])
        return with_names(metadata, words_of(asked, ours))

    return listener_told(release, restate)


def _loaded_in_time(wrapped: Wrapped, instance: Any, request: Any, *more: Any, **named: Any) -> Any:
    """Loads no prompt that has waited longer than P keeps its blocks: D computes it.

    A worker that finds out too late can only leave the load unfinished.
    """
    found, scheduler = wrapped(request, *more, **named), connector_scheduler(instance)
    state = scheduler_state(scheduler)
    lease = leases_of(None, state.facts).seconds
    if not found[0] or state.of(read_request.Waits).since(request.arrival_time) <= lease:
        return found
    read_request.leave_unread(scheduler, request, state.facts)
    _STALE_LOG.warning(
        "request %s has waited for more than the %.0f s that P keeps its blocks for "
        "(VLLM_NIXL_ABORT_REQUEST_TIMEOUT): it is computed here",
        *(shown(request.request_id), lease),
    )
    return 0, False


def _whole_blocks(wrapped: Wrapped, instance: Any, request: Any, num_computed_tokens: int) -> Any:
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


# --- <= 0.13 D shakes hands with one rank of P ------------------------------------------
#
# Each worker shakes hands with the one rank of its peer that its own number leads to, and divides
# by the ratio of ranks, which is 0 where P has more. So it asks once for each rank that it needs,
# and is told of a peer of as many ranks as it has.


def ranks_to_read(tp_rank: int, tp_size: int, remote_tp_size: int) -> tuple[int, ...] | None:
    """Returns the ranks of a larger peer whose heads one rank holds; None unless all are whole.

    Each rank of the peer is one of ours' alone, and is told by it alone.
    """
    ratio, rest = divmod(remote_tp_size, tp_size)
    return None if rest else tuple(range(tp_rank * ratio, (tp_rank + 1) * ratio))


class HandshakeWithOneRank(ObjectProxy):
    """A worker while it shakes hands with the rank of a peer that we choose.

    The release works out the rank's number as if both sides had as many ranks, and ours were that
    one. Everything else is the worker's own, which other threads go on using.
    """

    def __init__(self, worker: Any, remote_rank: int, remote_tp_size: int) -> None:
        super().__init__(worker)
        self._self_rank = remote_rank
        self._self_tp_size = remote_tp_size

    @property
    def tp_rank(self) -> int:
        """Returns the rank, in releases <= 0.11.0."""
        return self._self_rank

    @property
    def _tp_size(self) -> dict[str, int]:
        """Returns this engine's number of ranks, in releases <= 0.11.0."""
        return {self.engine_id: self._self_tp_size}

    @property
    def kv_topo(self) -> Any:
        """From 0.11.1 on."""
        return _TopologyOfOneRank(self.__wrapped__.kv_topo, self._self_rank)


class _TopologyOfOneRank(ObjectProxy):
    """The release's topology, but for the remote rank that it leads to."""

    def __init__(self, topology: Any, remote_rank: int) -> None:
        super().__init__(topology)
        self._self_rank = remote_rank

    def get_target_remote_rank(self, remote_tp_size: int) -> int:
        return self._self_rank


class RemoteAgents(dict[int, str]):
    """NIXL's names of a peer's ranks, by rank; the first one's for a rank that is not there.

    The release looks for a rank of its own number, to send it a notification.
    """

    def __missing__(self, rank: int) -> str:
        return next(iter(self.values()))


def _nixl_handshake(
    wrapped: Wrapped,
    instance: Any,
    host: str,
    port: int,
    remote_tp_size: int,
    expected_engine_id: str,
) -> Any:
    """Shakes hands with each rank of a larger peer whose heads this one holds."""
    asked = host, port, remote_tp_size, expected_engine_id
    has_more = remote_tp_size > instance.world_size
    is_asking = isinstance(instance, HandshakeWithOneRank)
    if is_asking or worker_state(instance).held(Reader) is None or not has_more:
        return wrapped(*asked)
    ranks = ranks_to_read(instance.tp_rank, instance.world_size, remote_tp_size)
    if ranks is None:
        raise PeerRefused(
            f"engine {expected_engine_id} cannot be read: it has {remote_tp_size} tensor-"
            f"parallel ranks and we have {instance.world_size}",
            "use a --tensor-parallel-size on the prefill side that is a multiple of the decode "
            "side's",
        )
    agents = RemoteAgents()
    for rank in ranks:
        known = instance.dst_xfer_side_handles.pop(expected_engine_id, None)
        if known is not None:  # of the rank before: the release keeps one, ours need none
            instance.nixl_wrapper.release_dlist_handle(known)
        asking = HandshakeWithOneRank(instance, rank, remote_tp_size)
        agents.update(type(instance)._nixl_handshake(asking, *asked))
    return agents


# --- <= 0.15 the blocks of an aborted request may be another one's at once -------------
#
# So nothing more of its reads is placed. Reads are known by the object that they were made for, and
# not by the request's name: on releases <= 0.13 a client may come back under the name of a request
# that it gave up, between two steps.


class AbortedReads:
    """The reads of one worker whose requests were aborted.

    kvpatch takes such a read out of the release's account, which would report it as received. It
    reports the request once nothing of it is on the wire any more. The scheduler then only frees
    the request's blocks.
    """

    def __init__(self) -> None:
        #: Of the requests that are wanted, and those among them that this step has brought.
        self._requests: dict[str, ReadRequest] = {}
        self._new: set[str] = set()
        #: Of requests that are over, as long as a read holds them, by identity.
        self._given_up: WeakValueDictionary[int, ReadRequest] = WeakValueDictionary()
        self._ending: dict[str, list[Any]] = {}
        #: Requests that the release has reported while a read of theirs still ended.
        self._reported: set[str] = set()

    def begin(self, requests: Mapping[str, ReadRequest]) -> None:
        """Books what the scheduler asks for in a step."""
        for request_id in requests.keys() & self._requests.keys():
            self._give_up(self._requests[request_id])
        self._requests.update(requests)
        self._new = set(requests)

    def end(self, worker: Any, request_ids: Collection[str]) -> None:
        """Gives up what was read for requests that are over.

        Args:
            request_ids: that ended before this step: what came with it is another request's.
        """
        for request_id in request_ids:
            request = None if request_id in self._new else self._requests.pop(request_id, None)
            if request is not None:
                self._give_up(request)
        self._new.clear()
        for request_id, entries in list(worker._recving_transfers.items()):
            left = [entry for entry in entries if not self._take(request_id, entry)]
            if not left:  # the release would take it for received
                del worker._recving_transfers[request_id]
            elif len(left) < len(entries):
                worker._recving_transfers[request_id] = left

    def _give_up(self, request: ReadRequest) -> None:
        self._given_up[id(request)] = request

    def _take(self, request_id: str, entry: Any) -> bool:
        read = entry[0] if isinstance(entry, tuple) else entry  # with a time <= 0.12
        if not isinstance(read, OwnRead):
            return False
        given_up = self._given_up.get(id(read.owner))
        if given_up is None or not read.void():
            return False
        self._ending.setdefault(request_id, []).append(read)
        return True

    def report(self, worker: Any, received: Collection[str]) -> set[str]:
        """Returns what the scheduler is to be told of, with what the release has found."""
        found = set(received)
        for request_id, reads in list(self._ending.items()):
            going = [read for read in reads if _is_going(read, worker.nixl_wrapper)]
            if going:
                self._ending[request_id] = going
                self._reported |= found & {request_id}
                found.discard(request_id)
                continue
            del self._ending[request_id]
            if request_id in self._reported:
                self._reported.discard(request_id)
                found.add(request_id)
            elif request_id not in worker._recving_transfers and request_id not in self._requests:
                found.add(request_id)
                if worker_state(worker).facts.keeps_load_metadata:
                    worker._recving_metadata.pop(request_id, None)
        return found


def _is_going(read: OwnRead, nixl: Any) -> bool:
    """True if a read that was given up has something on the wire; lets go of it otherwise."""
    errors = errors_of(nixl)
    try:
        if read.state() == "PROC":
            return True
    except errors as error:
        _LOG.warning("a read that was given up has failed: %s", error)
    try:
        read.release()
    except errors as error:
        _LOG.warning("a read that was given up could not be released: %s", error)
    return False


def _get_finished(wrapped: Wrapped, instance: Any, finished_req_ids: set[str]) -> Any:
    worker = instance.connector_worker
    if worker is None or worker_state(worker).held(Reader) is None:
        return wrapped(finished_req_ids)
    reads = worker_state(worker).of(AbortedReads)
    reads.end(worker, finished_req_ids)
    sent, received = wrapped(finished_req_ids)
    return sent, reads.report(worker, received or ())


def _start_load_kv(wrapped: Wrapped, instance: Any, metadata: Any) -> Any:
    if worker_state(instance).held(Reader) is not None:
        entries = metadata.reqs_to_recv.items()
        found = ((name, read_request.read_request_of(entry)) for name, entry in entries)
        loads = {name: request for name, request in found if request and any(request.local_blocks)}
        worker_state(instance).of(AbortedReads).begin(loads)
    return wrapped(metadata)


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    """Returns what is wrapped in a release ``<= 0.15`` beside what all need."""
    found: dict[Site, Wrapper | Step] = {
        seams.start_load_kv(facts): _start_load_kv,
        seams.get_finished(facts): _get_finished,
    }
    if facts.meets_one_rank:
        found[seams.nixl_handshake(facts)] = _nixl_handshake
    if not facts.listens_in_scheduler:
        found |= registration_step(facts, words_in_answers)
        found[seams.get_num_new_matched_tokens(facts)] = _loaded_in_time
    if facts.loads_whole_blocks_only:
        found[seams.scheduler_matched_tokens(facts)] = _whole_blocks
    return found
