"""A handshake with one rank of a peer: what is known of both sides, and what is then done.

The release is left with a peer that it reads rightly, and shown one of another geometry as one
like us. Which it is, :func:`~kvpatch.connector.handshake.compatibility.decide` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvpatch.connector.handshake.agent_metadata import (
    Statement,
    as_alike,
    of_blocks,
    read_statement,
)
from kvpatch.connector.handshake.block_shapes import heads_of
from kvpatch.connector.handshake.candidates import declared
from kvpatch.connector.handshake.compatibility import (
    Decision,
    LocalCache,
    Outline,
    Prove,
    Read,
    Refuse,
    UnreadCache,
    has_ranks_unmet,
)
from kvpatch.connector.handshake.kv_head_replication import (
    heads_as_if_unshared,
    heads_called,
    shares_heads,
)
from kvpatch.connector.handshake.remote_ranks import Rank
from kvpatch.connector.local.cache_kinds import Kind
from kvpatch.connector.local.kinds_of_layers import has_slots, kind_of
from kvpatch.connector.local.local_geometry import LocalGeometry, own_regions
from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.connector.reading.reader import Reader
from kvpatch.connector.smaller_blocks_admission import why_misread
from kvpatch.connector.speculative_decoding import hides_ends_of_lists
from kvpatch.connector.split_handles import blocks_undivided
from kvpatch.connector.state import WorkerState, worker_state
from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import one_line, shown
from kvpatch.geometry import layer_by_layer

_LOG = logging.getLogger("kvpatch.unlike_engines")

# --- what is known ----------------------------------------------------------------------


def local_cache(release: ReleaseWorker) -> LocalCache | UnreadCache:
    """This worker's cache, as far as a peer of its is judged by it."""
    state = worker_state(release.worker)
    reader, misread = state.reader, partial(why_misread, release)
    if reader is None:
        return _unread_cache(release, misread)
    staging_bytes = reader.pool.size_bytes if reader.mode == "staged" else None
    return LocalCache(
        reader.ours,
        reader.planes,
        staging_bytes=staging_bytes,
        reads_all=reader.reads_all,
        is_shown=reader.is_for_all,
        hides_ends=hides_ends_of_lists(
            release.worker.vllm_config, reader.groups, has_unlike_shapes=reader.ours.unlike_shapes
        ),
        has_sure_layout=_has_sure_layout(state, reader.ours),
        declared=declared(release.facts),
        misreads_smaller=misread,
    )


def _unread_cache(release: ReleaseWorker, misread: Callable[[], str]) -> UnreadCache:
    worker, knows_keys = release.worker, release.key_order() is not None
    return UnreadCache(
        worker.block_size,
        worker.world_size,
        _layout_of(worker) if knows_keys else worker.kv_cache_layout,
        backend="" if knows_keys else worker.backend_name,
        needs_reader=worker_state(worker).is_host_buffered,
        knows_keys=knows_keys,
        has_heads=not worker.use_mla,
        kinds=partial(_kinds_of, release),
        misreads_smaller=misread,
    )


def _kinds_of(release: ReleaseWorker) -> Mapping[str, Kind]:
    layers = getattr(release.worker, "device_kv_caches", ())
    return {layer: kind_of(release, layer, has_slots=has_slots(release, layer)) for layer in layers}


def _layout_of(worker: Any) -> Any:
    if getattr(worker, "use_host_buffer", False):
        return getattr(worker, "host_buffer_kv_cache_layout", None)
    return getattr(worker, "kv_cache_layout", None)


def _has_sure_layout(state: WorkerState, ours: LocalGeometry) -> bool:
    """Whether peers on devices like ours have the layout that they state.

    A stock peer on a device without storages states the layout that was asked for, and its host
    buffer has the one of its tensors' shapes.
    """
    buffer = state.host_buffer
    return (
        buffer is None
        or buffer.caches is None
        or all(layer.has_heads_by_turns for layer in ours.layers.values())
    )


# --- what is done ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Handshake:
    """A call of the release's that books one rank of a peer.

    Attributes:
        wrapped: the release's own.
        contexts: the peer's context-parallel size, where the release hands it on (from 0.29).
    """

    wrapped: Callable[..., Any]
    worker: Any
    facts: ReleaseFacts
    metadata: Any
    tp_rank: int
    tp_size: int
    contexts: tuple[Any, ...]

    def read(self, local: LocalCache | UnreadCache) -> Statement | Outline:
        """What the peer states, as far as our side of it asks.

        Raises:
            PeerRefused: it states what cannot be true.
        """
        if isinstance(local, UnreadCache) and local.knows_keys:
            stated = self.metadata
            return Outline(
                stated.engine_id,
                self.tp_size,
                getattr(stated, "block_size", None),
                getattr(stated, "kv_cache_layout", None),
            )
        statement = read_statement(self.metadata, self.tp_rank, self.tp_size)
        reader = worker_state(self.worker).reader
        if reader is not None:
            # Both grow in other threads; what is on its way is a future.
            booked = tuple(self.worker._remote_agents), tuple(self.worker._handshake_futures)
            reader.keep((*booked[0], *booked[1], statement.engine_id))
        return replace(statement, shares_tokens=any(size != 1 for size in self.contexts))

    def act(self, decision: Decision) -> Any:
        """Has the release book the peer as what it was found to be.

        Raises:
            PeerRefused: it was refused, or is more than can be prepared for.
        """
        if isinstance(decision, Refuse):
            raise decision.error
        state = worker_state(self.worker)
        if isinstance(decision, Prove):
            return self._add_to_prove(decision, _reader(state))
        peer = decision.mapping.statement if isinstance(decision, Read) else decision.peer
        if isinstance(decision, Read):
            agent = self._add_heterogeneous(decision.mapping, _reader(state))
        elif peer is None:
            agent = self.as_release()
        else:
            agent = self._add_like(peer, _reader(state))
        block_tokens = 0 if peer is None else _block_tokens(peer)
        state.ambiguous_peers.settle(self.metadata.engine_id, block_tokens)
        return agent

    def as_release(self) -> Any:
        """Has the release book the peer as it is."""
        return self._book(self.metadata, self.tp_size)

    def _book(self, metadata: Any, tp_size: int) -> Any:
        refuse_endless(self.worker, metadata)
        return self.wrapped(metadata, self.tp_rank, tp_size, *self.contexts)

    def _add_like(self, peer: Statement, reader: Reader) -> Any:
        if reader.has_state:
            have_our_parts(self.worker, reader.ours, peer)
        reader.admit_like(peer.engine_id)
        return self.as_release()

    def _add_heterogeneous(self, rank: Rank, reader: Reader) -> Any:
        statement = rank.statement
        with blocks_undivided(self.worker):
            rank.agent = self._as_alike(statement, reader.ours)
        reader.admit(rank)
        peer = one_line(f"{shown(statement.engine_id)}: it has {statement}")
        _LOG.info("reading from engine %s; we have %s", peer, reader.ours)
        return rank.agent

    def _add_to_prove(self, decision: Prove, reader: Reader) -> Any:
        """Nothing is loaded from such a peer before it is proven what it is."""
        first = next(iter(decision.mappings.values())).statement
        if isinstance(decision.stock, int):  # how its blocks are cut is all that is open
            have_our_parts(self.worker, reader.ours, first)
            agent = self.as_release()
        else:
            # The release reads the one that turns out to be like us, any block of it.
            shows_all = decision.stock is not None
            with nullcontext() if shows_all else blocks_undivided(self.worker):
                agent = self._as_alike(first, reader.ours, shows_all=shows_all)
        for rank in decision.mappings.values():
            rank.agent = agent
        refusals = {name: refused.error for name, refused in decision.refusals.items()}
        reader.admit_ambiguous(decision.mappings, refusals, decision.stock)
        _LOG.info(
            "engine %s does not state all of its blocks, and is not read before a prompt has shown "
            "it: it has %s, or one of %d; we have %s",
            shown(first.engine_id),
            one_line(first),
            len(decision.mappings) + len(decision.refusals),
            reader.ours,
        )
        return agent

    def _as_alike(self, peer: Statement, ours: LocalGeometry, *, shows_all: bool = False) -> Any:
        """Shows the release a peer like us, within the memory of this one; its name to NIXL.

        Args:
            shows_all: whether the release may come to read it, and not one block's worth of it
                for its books: it makes descriptors of all that it is shown.
        """
        layout = layer_by_layer("HND", like=ours.layout)
        alike = as_alike(
            self.metadata,
            peer,
            block_tokens=ours.block_tokens,
            kernel_blocks_per_block=ours.kernel_blocks_per_block,
            layout=layout,
            block_bytes=alike_block_bytes(ours, peer),
            own=own_regions(self.worker),
        )
        if not shows_all:
            alike = of_blocks(alike, ours.kernel_blocks_per_block)
        have_our_parts(self.worker, ours, peer)
        shown_ranks = ours.tp_size if has_ranks_unmet(ours, peer) else self.tp_size
        heads = heads_as_if_unshared(ours, peer)
        with layout_called(self.worker, layout), heads_called(self.worker, heads):
            return self._book(alike, shown_ranks)


def _reader(state: WorkerState) -> Reader:
    if state.reader is None:
        raise PeerRefused(
            "a worker registered its caches anew in the middle of a handshake",
            "send the request again",
        )
    return state.reader


def _block_tokens(peer: Statement) -> int:
    """Of one of the blocks that its ids count; 0 where that is not known."""
    return (peer.block_tokens or 0) * (peer.kernel_blocks_per_block or 1)


def alike_block_bytes(ours: LocalGeometry, peer: Statement) -> tuple[int, ...]:
    """What a block would have on the peer if its blocks were ours: its heads, our tokens."""
    if not ours.has_heads or has_ranks_unmet(ours, peer):  # shown as a rank like ours
        return ours.block_bytes
    if shares_heads(ours, peer):  # shown as if each rank had heads of its own
        return tuple(length * ours.tp_size // peer.tp_size for length in ours.block_bytes)
    _, our_heads = heads_of(ours.total_heads, ours.tp_rank, ours.tp_size)
    _, their_heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    return tuple(length * their_heads // our_heads for length in ours.block_bytes)


#: Of a peer's memory the release prepares a descriptor for each block of each region. So many
#: at least may always be, and so many times as many as this worker has of its own.
_DESCRIPTORS = 1 << 24
_TIMES_OWN = 16


def refuse_endless(worker: Any, metadata: Any) -> None:
    """Refuses a peer of which the release would prepare more than this process can hold.

    Raises:
        PeerRefused: it states more blocks than any cache of this model has.
    """
    regions = len(metadata.kv_caches_base_addr)
    counts = getattr(metadata, "region_num_blocks", None)  # from 0.30
    found = sum(counts) if counts else metadata.num_blocks * regions
    most = max(_DESCRIPTORS, _TIMES_OWN * getattr(worker, "num_blocks", 0) * regions)
    if found > most:
        raise PeerRefused(
            f"engine {metadata.engine_id!r:.200} cannot be read: it states {found} blocks in "
            f"{regions} regions, and {most} are the most that are prepared for, {_TIMES_OWN} times "
            "our own",
            "give this engine more KV cache, or the prefill side larger blocks",
        )


def have_our_parts(worker: Any, ours: LocalGeometry, peer: Statement) -> None:
    """Has 0.20 cut the blocks of a hybrid model's peer as ours are.

    It takes a page for no larger than its states need, which a larger --block-size makes it: it
    then ends even between like engines, by an assertion without a word.
    """
    told = getattr(worker, "_physical_blocks_per_logical", None)
    if isinstance(told, dict):
        told[peer.engine_id] = ours.kernel_blocks_per_block


@contextmanager
def layout_called(worker: Any, layout: str) -> Iterator[None]:
    """While inside, the worker compares its peer's layout with this one.

    The release splits heads over ranks in HND only; ours are split by the plan.
    """
    if not hasattr(worker, "kv_cache_layout"):  # 0.10.0
        yield
        return
    own = worker.kv_cache_layout
    worker.kv_cache_layout = layout
    try:
        yield
    finally:
        worker.kv_cache_layout = own
