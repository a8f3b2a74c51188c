"""The facts that a request's load needs of its peer, sent from the scheduler to the worker.

Pairing by token position needs the number of tokens, which only the scheduler
knows in most releases, and the peer's blocks in the peer's own size, which some
releases convert by our own before the worker can look.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from kvpatch.core.errors import ReadRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.worker.state import is_push, scheduler_state, worker_state
from kvpatch.worker.unpatched_workers import is_guarded, require

_READ_REQUEST = "kvpatch_read_request"
_REMOTE_BLOCKS = "kvpatch_remote_blocks"
#: What P's answer says for checks, each as one string.
HOLD, DIGEST = "kvpatch_hold", "kvpatch_digest"
#: By which it is told how far the clocks of two processes are apart: the shortest way of each of
#: the last moments in which something came. What comes all at once after a stall is one moment.
_LAST_MOMENTS, _MOMENT_SECONDS = 16, 1.0


@dataclass(frozen=True)
class ReadRequest:
    """The facts of one load, as the scheduler knew them.

    Attributes:
        tokens: how many tokens of the prompt both sides hold in the end.
        remote_tokens: how many tokens the peer holds; its blocks end with the last of them.
        local_blocks: per cache group, the blocks to fill, without those of a prefix hit.
        remote_blocks: per cache group, the peer's blocks, in the peer's own size.
        hit_tokens: the tokens of D's own prefix hit; None where the length of a list says it.
        waited: seconds since D got the request, by the scheduler's clock; None where unknown.
        is_read_back: True if a P reads an earlier turn back from a D.
        spare_slots: how many slots P's blocks may have behind the tokens that it says it holds,
            beside one block; None where it says no count (<= 0.20).
        stated: what P's answer says for checks, by field.
        is_guarded: True if a process without kvpatch would read wrong blocks; it cannot
            unpickle this then.
        is_to_fail: True if D can neither load all of an image nor compute it.
        stages: D's pipeline stages, where P is told to wait for all of them; else 1.
    """

    tokens: int
    remote_tokens: int
    local_blocks: tuple[tuple[int, ...], ...]
    remote_blocks: tuple[tuple[int, ...], ...]
    hit_tokens: int | None = None
    waited: float | None = None
    is_read_back: bool = False
    spare_slots: int | None = None
    stated: Mapping[str, str] = field(default_factory=dict, compare=False)
    is_guarded: bool = False
    is_to_fail: bool = False
    stages: int = 1
    #: When the scheduler sent it, as ``time.monotonic`` counts in this process.
    known_since: float = field(default_factory=lambda: time.monotonic(), compare=False, repr=False)

    @property
    def arrived(self) -> float | None:
        """Returns when D got the request, as ``time.monotonic`` counts in this process."""
        return None if self.waited is None else self.known_since - self.waited

    def __reduce__(self) -> tuple[Any, ...]:
        told = (getattr(self, one.name) for one in fields(self) if one.name != "known_since")
        return _unpickled, (self.known_since, *told)


def _unpickled(sent: float, *values: Any) -> ReadRequest:
    """Returns what a worker is told, which may have waited for it to end the step before."""
    found = ReadRequest(*values)
    if found.is_guarded:
        require("unlike_engines")
    _MESSAGES.take(sent)
    return replace(found, known_since=time.monotonic() - _MESSAGES.since(sent))


def attach_read_requests(scheduler: Any, waiting: Mapping[str, Any], metadata: Any) -> None:
    """Writes what each request reads onto its entry in the connector's metadata.

    Args:
        waiting: the scheduler's own record of requests to receive, by request id,
            taken before it was cleared; each value starts with the request.
    """
    state = scheduler_state(scheduler)
    facts, planned, waits = state.facts, state.of(PlannedLoads), state.of(Waits)
    # In push mode no worker looks at it. Workers that are known to be without kvpatch were left
    # out where the load was planned, of what the scheduler knew of the peer then.
    may_guard = not (is_push(scheduler) or state.has_stock_workers)
    stages = _counted_stages(scheduler, facts) if may_guard else 1
    # Slots for drafts, and the blocks of drafts that were rejected, as many as D's at most.
    speculative = scheduler.vllm_config.speculative_config
    spare = 1 + 2 * int(speculative.num_speculative_tokens or 0) if speculative else 0
    for request_id, entry in metadata.reqs_to_recv.items():
        request = waiting[request_id][0]
        parameters = request.kv_transfer_params or {}
        tokens, held = loaded_tokens(scheduler, request, facts, planned)
        local, remote = groups(entry.local_block_ids), groups(remote_blocks(entry, facts))
        has_load = any(local)
        found = ReadRequest(
            tokens,
            held,
            local,
            remote,
            _hit_tokens(request, facts),
            is_guarded=has_load
            and may_guard
            and is_guarded(
                scheduler, state.equal_peers, engine_of(entry, facts), held, remote, facts
            ),
            waited=waits.since(request.arrival_time),
            is_read_back=bool(parameters.get("do_remote_decode")),
            spare_slots=None if stated_tokens(parameters) is None else spare,
            stated=stated_for_checks(parameters) if has_load else {},
            is_to_fail=request in state.of(FailingLoads),
            stages=stages,
        )
        setattr(entry, _READ_REQUEST, found)


def _counted_stages(scheduler: Any, facts: ReleaseFacts) -> int:
    """Returns D's pipeline stages, where the release has each of them read its own layers."""
    if not facts.names_regions:
        return 1
    return int(scheduler.vllm_config.parallel_config.pipeline_parallel_size)


def stated_for_checks(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a request's parameters have of P's for checks, by field."""
    # A typed proxy sends an empty text for none.
    return {name: str(parameters[name]) for name in (HOLD, DIGEST) if parameters.get(name)}


class PlannedLoad(NamedTuple):
    """The size of a load, as D's scheduler states it before the request gets its blocks.

    Attributes:
        tokens: how many tokens of the prompt D has once the load is done.
        remote_tokens: how many tokens the peer holds.
    """

    tokens: int
    remote_tokens: int


class PlannedLoads(WeakKeyDictionary[Any, PlannedLoad]):
    """The loads that one scheduler has planned, by vLLM's request (``common_prompt``)."""


class FailingLoads(WeakSet[Any]):
    """Requests whose loads are to fail: D can neither load all of an image nor compute it.

    They fail at a worker: then the release ends the request alone (``kv_load_failure_policy``).
    """


class Waits:
    """The time that something took from one process of D to another, beyond the shortest ways.

    Each of the two has a clock of its own, and one may be on another machine. So the shortest of
    the last ways counts as none: it is what the clocks are apart, and less than a step. A clock
    that is set misleads no more than these.

    Requests wait between vLLM's API server, which writes down when they arrive, and the scheduler;
    messages between the scheduler and a worker, which may be at the step before.

    Args:
        clock: of the other process, as this one has it.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.time()) -> None:
        self._clock = clock
        self._ways: deque[float] = deque(maxlen=_LAST_MOMENTS)
        self._began = 0.0

    def take(self, then: float) -> None:
        """Records that something has come, which the other process sent at that time."""
        way, now = self._clock() - then, time.monotonic()
        if self._ways and now - self._began < _MOMENT_SECONDS:
            self._ways[-1] = min(self._ways[-1], way)
        else:
            self._ways.append(way)
            self._began = now

    def since(self, then: float) -> float:
        """Returns the seconds that have passed since then."""
        found = self._clock() - then
        if not self._ways:  # of another scheduler than vLLM's
            self._ways.append(found)
        return max(0.0, found - min(self._ways))


#: The step's messages of this worker's scheduler.
_MESSAGES = Waits(lambda: time.monotonic())


def leave_unread(
    scheduler: Any, request: Any, facts: ReleaseFacts, *, is_loading: bool = False
) -> None:
    """Stops the release from loading a request's prompt and from telling P that it was read.

    Args:
        is_loading: True if another request loads the same blocks: D goes on to renew their lease.
    """
    request.kv_transfer_params.update(do_remote_prefill=False, _remote_blocks_processed=True)
    if facts.reads_back and scheduler.is_bidirectional_kv_xfer_enabled:
        scheduler._reqs_in_batch.add(request.request_id)  # or D never lets go of its own blocks
    if facts.grants_leases and is_loading:
        scheduler._heartbeat_req_engine.pop(request.request_id, None)
    elif facts.grants_leases:
        scheduler._stop_heartbeat(request.request_id)


def loaded_tokens(
    scheduler: Any, request: Any, facts: ReleaseFacts, planned: PlannedLoads
) -> PlannedLoad:
    """Returns the planned load of a request, or what the release loads where nobody plans."""
    found = planned.get(request)
    if found is not None:
        own = 0 if facts.counts_loaded_slots else request.num_computed_tokens
        # The scheduler may load less than it was told to.
        return found._replace(tokens=own) if 0 < own < found.tokens else found
    prompt = prefilled_tokens(scheduler, request, facts)
    parameters = request.kv_transfer_params or {}
    held = stated_tokens(parameters) or prompt
    # A prefill engine that reads back an earlier turn wants what there is of it.
    tokens = min(prompt, held) if parameters.get("do_remote_decode") else prompt
    if facts.loads_whole_blocks_only:
        tokens -= tokens % scheduler.block_size
    return PlannedLoad(tokens, held)


def stated_tokens(parameters: Mapping[str, Any]) -> int | None:
    """Returns how many tokens a peer says that it holds (from 0.21 on); None where it does not."""
    held = parameters.get("remote_num_tokens")  # a proxy's text, where transfer_params is off
    return held if isinstance(held, int) and held > 0 else None


def held_tokens(request: Any, answer: Mapping[str, Any], *, prompt_alone: bool) -> int:
    """Returns how many tokens of a finished request P holds, by its answer or as computed.

    Args:
        prompt_alone: True if what was computed behind the prompt is not held (a host buffer).
    """
    held = int(answer.get("remote_num_tokens") or request.num_computed_tokens)
    return min(held, int(request.num_prompt_tokens)) if prompt_alone else held


def prefilled_tokens(scheduler: Any, request: Any, facts: ReleaseFacts) -> int:
    """Returns how many of a request's prompt P computes.

    Not the last ones of a model with recurrent state, or where D's drafter needs them.
    """
    prompt = int(request.num_prompt_tokens)
    if not facts.prefill_count:
        return prompt
    return int(getattr(scheduler, facts.prefill_count)(prompt))


def _hit_tokens(request: Any, facts: ReleaseFacts) -> int | None:
    """Returns the tokens of D's own prefix cache, where its list of blocks does not tell them."""
    if not facts.reserves_drafted_blocks or not facts.counts_prefix_hits:
        return None
    stats = request.prefill_stats  # None once a request was preempted
    return None if stats is None else int(stats.num_local_cached_tokens)


def read_request_of(entry: Any) -> ReadRequest | None:
    """Returns what is written on an entry of the connector's metadata; None where nothing is."""
    found = getattr(entry, _READ_REQUEST, None)
    return found if isinstance(found, ReadRequest) else None


def _address(entry: Any, facts: ReleaseFacts) -> tuple[Any, str]:
    """Returns where an entry has what it says of its peer, and what the names there begin with."""
    return (entry.remote, "") if facts.names_remote_request else (entry, "remote_")


def engine_of(entry: Any, facts: ReleaseFacts) -> str:
    owner, prefix = _address(entry, facts)
    return str(getattr(owner, f"{prefix}engine_id"))


def remote_blocks(entry: Any, facts: ReleaseFacts) -> Any:
    """Returns the peer's blocks as the entry has them now."""
    owner, prefix = _address(entry, facts)
    return getattr(owner, f"{prefix}block_ids")


def local_blocks(entry: Any, facts: ReleaseFacts) -> Any:
    """Returns D's blocks, as the release pairs them with what the entry has of the peer's."""
    if not facts.expands_remote_blocks:
        return entry.local_block_ids
    return entry.local_physical_block_ids


def replace_remote_blocks(entry: Any, blocks: Sequence[Sequence[int]], facts: ReleaseFacts) -> None:
    """Gives the entry others of the peer's blocks to be read, per cache group."""
    setattr(entry, _REMOTE_BLOCKS, remote_blocks(entry, facts))
    grouped = are_grouped(entry.local_block_ids)
    named = [list(group) for group in blocks] if grouped else list(blocks[0])
    _set_remote_blocks(entry, named, facts)


def match_local_block_count(entry: Any, facts: ReleaseFacts) -> None:
    """Gives the entry as many remote blocks as local ones, all of them block 0.

    The release pairs the two lists one to one; kvpatch decides which bytes that means.
    """
    named = [[0] * len(group) for group in groups(local_blocks(entry, facts))]
    replace_remote_blocks(entry, named, facts)


def restore_remote_blocks(entry: Any, facts: ReleaseFacts) -> None:
    """Undoes :func:`replace_remote_blocks`.

    A release that shakes hands again first (from 0.32) comes back with the same entry,
    and the peer may have turned into one like us.
    """
    own = getattr(entry, _REMOTE_BLOCKS, None)
    if own is not None:
        _set_remote_blocks(entry, own, facts)


def _set_remote_blocks(entry: Any, blocks: Any, facts: ReleaseFacts) -> None:
    owner, prefix = _address(entry, facts)
    setattr(owner, f"{prefix}block_ids", blocks)


def are_grouped(blocks: Any) -> bool:
    """True if there is a list of block ids per cache group, and not a flat one (<= 0.17)."""
    return bool(len(blocks)) and hasattr(blocks[0], "__len__")


def groups(blocks: Any) -> tuple[tuple[int, ...], ...]:
    """Block ids per cache group; a flat list is the only group's."""
    if len(blocks) and not are_grouped(blocks):
        return (tuple(blocks),)
    return tuple(tuple(group) for group in blocks) or ((),)


def stated_end(worker: Any, engine_id: str, entry: Any, facts: ReleaseFacts) -> float | None:
    """Returns when the peer has said that its blocks expire, as ``time.monotonic`` counts.

    The peer counts on its own clock, and the handshake has told how far that is from D's.
    None where nobody says so.
    """
    if "remote_blocks_expiry_time" not in facts.params:
        return None
    stated, offset = entry.remote.blocks_expiry_time, worker._engine_clock_offset.get(engine_id)
    if not isinstance(stated, int | float) or offset is None:
        return None
    return time.monotonic() + float(stated) - float(offset) - time.perf_counter()


# --- the readers that P waits for: the release counts those of one pipeline stage (from 0.30) -----

_COUNTED = "_kvpatch_counts_stages"


def count_stages(worker: Any, engine_id: str, stages: int) -> None:
    """Makes the notifications of a peer's loads count the readers of all of our stages.

    P frees a request's blocks once it has as many notifications as the last one of them says. So
    all stages must say the same: one without kvpatch says what the release counts.
    """
    mapping = worker.tp_mappings.get(engine_id)
    if mapping is None or hasattr(mapping, _COUNTED):  # each handshake makes a new one
        return
    counted = replace(mapping, local_consumers=mapping.local_consumers * stages)
    object.__setattr__(counted, _COUNTED, True)
    worker.tp_mappings[engine_id] = counted


# --- the loads that the release reorders for a CPU: those of peers of another backend only --------
#
# From 0.20 on a D whose keys lie by column reorders what it has read of a peer whose backend has
# rows. It knows by one flag of its worker, which the first such peer sets for good: from then on it
# would reorder the loads of every peer, those of peers like it and those that we have placed.


@dataclass
class ReorderedLoads:
    """The loads of one worker that the release reorders.

    Attributes:
        peers: the engine ids of peers of another backend that were left to the release.
        arriving: the loads that were on their way when the release last looked: a load's own list
            of blocks, and True if it is from such a peer. None before the flag was up.
    """

    peers: set[str] = field(default_factory=set)
    arriving: Sequence[tuple[Any, bool]] | None = None

    def is_reordered(self, block_ids: Any) -> bool:
        """True if a load's blocks are another backend's rows.

        Args:
            block_ids: the very list that the load's metadata has.
        """
        if self.arriving is None:  # a handshake's thread has set the flag since: its peer is new
            return False
        for blocks, is_other in self.arriving:
            if blocks is block_ids:
                return is_other
        raise ReadRefused(
            f"vLLM would reorder {len(block_ids)} blocks of a load that was not on its way",
            "use one attention backend on both sides",
        )


def note_peer(worker: Any, metadata: Any) -> None:
    """Books a peer as the release has; it may have come back as an engine of another backend."""
    peers = worker_state(worker).of(ReorderedLoads).peers
    is_other = metadata.attn_backend_name != worker.backend_name
    if worker.enable_heterogeneous_attn_post_process and is_other:
        peers.add(metadata.engine_id)
    else:
        peers.discard(metadata.engine_id)


def note_loads(worker: Any) -> None:
    """Notes whose loads are coming, before the release looks at them and may reorder them."""
    state = worker_state(worker)
    loads = state.of(ReorderedLoads)
    loads.arriving = [
        (blocks, engine_of(meta, state.facts) in loads.peers)
        for meta in worker._recving_metadata.values()
        for blocks in meta.local_physical_block_ids[:1]
    ]
