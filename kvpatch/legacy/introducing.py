"""Which engines a scheduler loads from, where handshakes do not say all of a peer's blocks.

A worker finds out what a handshake leaves open from a prompt that D computes itself
(:mod:`kvpatch.legacy.proofs`). So the scheduler has D compute an engine's prompts until all
workers have announced that they can read it; P is told of each, as of a full prefix hit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpatch.connector.drafts import reserves_slots
from kvpatch.connector.reading.open_peers import OpenPeers
from kvpatch.connector.reading.reader import Reader
from kvpatch.connector.state import scheduler_state, worker_state
from kvpatch.core import settings
from kvpatch.core.releases import ReleaseFacts
from kvpatch.legacy.announcements import Announcements, Introductions
from kvpatch.legacy.proofs import SAMPLE_BYTES, Proofs
from kvpatch.legacy.samples import sampled_of
from kvpatch.transfer.storageless import StoragelessCaches

#: On what a worker has its scheduler hand to peers, and nowhere on the wire.
_MAY_LEAVE_OPEN = "kvpatch_may_leave_open"


def introductions_of(scheduler: Any, facts: ReleaseFacts) -> Introductions | None:
    """A scheduler's; None where handshakes leave nothing open that its workers would have
    to prove.

    0.10.0 loads a prompt into whole blocks and one more for drafted tokens: it takes the
    last blocks of P's for these, a block off, or ends.
    """
    state = scheduler_state(scheduler)
    if state.held(_NothingOpen) is not None:
        return None
    found = state.held(Introductions)
    if found is None:
        found = Introductions(
            scheduler.block_size,
            full_blocks_only=facts.loads_whole_blocks_only,
            allows_none=facts.loads_whole_blocks_only and reserves_slots(scheduler.vllm_config),
            declared=_declared(states_layout=facts.states_layout),
        )
        state.hold(found)
    return found


class _NothingOpen:
    """Held by a scheduler whose workers would have nothing to prove of any peer."""


def _declared(*, states_layout: bool) -> int | None:
    """The tokens of every peer's blocks, where nothing is left open beside."""
    has_layout = states_layout or settings.peer_layout() or settings.unstated_layout() == "same"
    return settings.peer_block_size() if has_layout else None


def book_proof(scheduler: Any, engine_id: str, block_tokens: int) -> None:
    """Books that all workers of a scheduler can read an engine."""
    found = scheduler_state(scheduler).held(Introductions)
    if found is not None:
        found.prove(engine_id, block_tokens)


def prove_peers(worker: Any) -> None:
    """Has a worker that has registered prove of its peers what their handshakes leave open."""
    state = worker_state(worker)
    reader = state.reader
    announcements = state.of(Announcements)
    if reader is None:
        state.open_peers = _NothingToProve(announcements)
    elif not isinstance(reader.proofs, Proofs):
        state.open_peers = reader.proofs = _proofs_of(reader, announcements)
    say_what_is_open(worker, may_leave_open=_may_leave_open(reader))


class _NothingToProve(OpenPeers):
    """Of a worker whose cache cannot be read into: any peer is the release's to read."""

    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements

    def settle(self, engine_id: str, block_tokens: int = 0) -> None:
        self._announcements.settle(engine_id, block_tokens)


def _proofs_of(reader: Reader, announcements: Announcements) -> Proofs:
    """What a worker is to prove of its peers, by what is read into its cache."""
    ours, destination = reader.ours, reader.destination
    layers = ours.layers if destination.layers is None else destination.layers
    caches = destination.caches if isinstance(destination.caches, StoragelessCaches) else None
    sampled = sampled_of(ours, reader.groups, layers, destination.tensors, caches)
    return Proofs(ours, sampled, reader.pool.aside(SAMPLE_BYTES), announcements)


def _may_leave_open(reader: Reader | None) -> bool:
    """Whether a peer's handshake may leave something open that this worker would prove."""
    if reader is None or settings.peer_block_size() is not None:
        return False
    sizes = reader.ours.kernel_sizes
    return reader.ours.misreads_blocks or (sizes is not None and sizes.cuts_some)


def say_what_is_open(worker: Any, *, may_leave_open: bool) -> None:
    """Has the worker's scheduler know whether peers' handshakes may leave something open.

    A worker without kvpatch says nothing, and could prove nothing: what it would read wrongly it
    cannot unpickle (:mod:`kvpatch.connector.other_processes`), and the rest is not kept from it.
    """
    metadata = getattr(worker, "xfer_handshake_metadata", None)  # from 0.11.1
    if metadata is not None:
        setattr(metadata, _MAY_LEAVE_OPEN, may_leave_open)


def hear_what_is_open(scheduler: Any, metadata: Iterable[Any]) -> None:
    """Books what :func:`say_what_is_open` has said, of all workers."""
    said = [vars(one).pop(_MAY_LEAVE_OPEN, False) for one in metadata]
    if said and not any(said):
        scheduler_state(scheduler).hold(_NothingOpen())
