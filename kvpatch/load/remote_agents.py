"""A handshake with one rank of a peer: reads both sides, and acts on the decision.

The release is left with a peer that it reads rightly, and is shown a heterogeneous one as one like
us. :func:`~kvpatch.peer.decision.decide` says which of the two a peer is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.core.proxies import bound_to
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import one_line, shown
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.load.read_request import note_peer
from kvpatch.load.reader import Loads, Reader
from kvpatch.load.reader_attachment import blocks_undivided
from kvpatch.peer.agent_metadata import AgentMetadata, read_agent_metadata
from kvpatch.peer.decision import Decision, LocalCache, Read
from kvpatch.peer.homogeneous_view import (
    block_bytes_as_ours,
    book_own_cut,
    check_descriptors,
    homogeneous_metadata,
    taken_for_like,
)
from kvpatch.peer.other_releases import PeerReleases, read_statement
from kvpatch.peer.peer_hash import NamedPeers
from kvpatch.peer.statement import (
    CONTENTS,
    DTYPE,
    KEYS,
    LAYOUT,
    SideChannels,
    check_contents,
    check_dtype,
    contents_of,
    declared_geometry,
    leaves_open,
    may_be_tiled,
    order_of,
    stated_blocks,
)
from kvpatch.peer.unread_caches import (
    UnreadCache,
    missed_layer,
    most_heads,
    planned_heads,
    why_misread,
)
from kvpatch.worker.kv_cache_groups import hides_ends_of_lists, reserves_slots
from kvpatch.worker.local_geometry import LocalGeometry, layout_of_backends, own_regions
from kvpatch.worker.recurrent_state import divided_states
from kvpatch.worker.registered_caches import DeviceCaches, has_slots, kind_of
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.shared_rows import shared_rows
from kvpatch.worker.state import WorkerState, worker_state

if TYPE_CHECKING:
    from kvpatch.peer.remote_ranks import RemoteRank

_LOG = logging.getLogger("kvpatch.unlike_engines")

# --- what is known ----------------------------------------------------------------------


def local_cache(release: ReleaseWorker) -> LocalCache | UnreadCache:
    """Returns this worker's cache, as far as a peer is judged by it."""
    state, worker = worker_state(release.worker), release.worker
    reader = state.held(Reader)
    if reader is None:
        return _unread_cache(release)
    ours, drafts = reader.ours, reserves_slots(worker.vllm_config)
    behind = state.held(DeviceCaches)
    return LocalCache(
        ours,
        reader.planes,
        staging_bytes=settings.staging_bytes() if reader.mode == "staged" else None,
        reads_all=reader.is_for_all or ours.misreads_blocks,
        hides_ends=hides_ends_of_lists(
            worker.vllm_config, reader.groups, layers_differ_in_shape=ours.layers_differ_in_shape
        ),
        is_plain=not (drafts or any(group.window_tokens for group in reader.groups)),
        # A stock peer on a device without storages states the layout that was asked for, and its
        # host buffer has the one of its tensors' shapes.
        has_sure_layout=behind is None
        or behind.caches is None
        or all(layer.has_heads_by_turns for layer in ours.layers.values()),
        declared=declared_geometry(),
        stages=release.stages,
    )


def _unread_cache(release: ReleaseWorker) -> UnreadCache:
    worker, facts = release.worker, release.facts
    knows_keys, layout = release.key_order() is not None, release.stated_layout
    layers = tuple(worker.device_kv_caches if facts.has_host_buffer else ())
    if knows_keys and facts.has_host_buffer and worker.use_host_buffer:
        layout = worker.host_buffer_kv_cache_layout if facts.has_host_buffer_layout else None
    kinds = {
        layer: kind_of(release, layer, has_slots=has_slots(release, layer)) for layer in layers
    }
    heads = most_heads(release, kinds)
    return UnreadCache(
        worker.block_size,
        worker.world_size,
        layout,
        worker.backend_name,
        needs_reader=worker_state(worker).is_host_buffered,
        knows_keys=knows_keys,
        has_heads=not worker.use_mla,
        kinds=kinds,
        misreads_smaller=why_misread(release, heads),
        rows=shared_rows(release),
        divisions=divided_states(release),
        state_bytes=release.state_bytes,
        mirror_layout=release.memory_layout if release.has_own_mirror else None,
        shares_tokens=max(release.context_sizes, default=1) > 1
        and not facts.states_context_parallelism,
        mixes_tokens=knows_keys
        and not facts.names_layouts
        and not worker.use_mla
        and not release.has_own_mirror
        and layout_of_backends(release, layers) == "NHD",
        most_heads=heads,
        total_heads=int(worker.model_config.get_total_num_kv_heads()),
        heads=planned_heads(release, kinds),
        row_parts=_row_parts(release),
        shared_parts=release.kernel_blocks_per_block
        if max(release.context_sizes[:1], default=1) > 1 and facts.states_context_parallelism
        else None,
        stages=release.stages,
        missed_layer=missed_layer(release, kinds),
    )


def _row_parts(release: ReleaseWorker) -> int | None:
    """Returns into how many parts a block is cut where all layers are one region (0.24 to 0.28)."""
    worker, facts = release.worker, release.facts
    is_cut = facts.has_host_buffer and facts.states_kernel_blocks and not facts.names_layouts
    if not is_cut or len(release.addresses) != 1:
        return None
    tensors = [one for one in worker.device_kv_caches.values() if not isinstance(one, list)]
    is_row = len({tensor.data_ptr() for tensor in tensors}) > 1
    return int(worker._physical_blocks_per_logical_kv_block) if is_row else None


def asks_for_keys(local: LocalCache, peer: AgentMetadata) -> bool:
    """True if P has the CPU backend, and its processor decides how its keys lie."""
    ours = local.geometry
    backend = ours.backend if peer.named is None else peer.named.backend
    form = ours.facts.form_of(backend)
    is_by_column = form is not None and form.by_column
    is_cpus = ours.key_order is not KeyOrder.ROW_MAJOR or is_by_column
    return is_cpus and may_be_tiled(ours, peer)


# --- what is done ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Handshake:
    """A call of the release's that books one rank of a peer.

    Attributes:
        contexts: the peer's context-parallel size, where the release hands it on (from 0.29).
    """

    wrapped: Callable[..., Any]
    release: ReleaseWorker
    metadata: Any
    tp_rank: int
    tp_size: int
    contexts: tuple[Any, ...]

    @cached_property
    def worker(self) -> Any:
        return self.release.worker

    @cached_property
    def facts(self) -> ReleaseFacts:
        return self.release.facts

    @cached_property
    def state(self) -> WorkerState:
        return worker_state(self.worker)

    def read(self, local: LocalCache | UnreadCache) -> AgentMetadata:
        """Returns what the peer states, as far as our side of it asks."""
        known, named = self.state.held(PeerReleases), self.state.of(NamedPeers).accepted
        if named is not None and isinstance(local, UnreadCache):
            raise PeerRefused(
                f"{named}, which is accepted where kvpatch reads into the cache, and it "
                "does not into ours (a host buffer of vLLM's, keys in tiles, context parallelism, "
                "layers that share caches)",
                "use one of each on both sides",
            )
        # What a P of another release has stated in its own words.
        stated = self.metadata.engine_id, self.tp_rank
        statement = None if known is None else known.stated(*stated)
        contents = contents_of(self.release) if statement is None else None
        if contents is not None:
            check_contents(contents, self._words.get(CONTENTS))
        if not self.facts.states_hash:  # no handshake compares the types of keys and values
            check_dtype(self.release.cache_dtype, self._words.get(DTYPE))
        if isinstance(local, UnreadCache) and statement is not None:
            raise PeerRefused(
                "this engine's cache is not one that kvpatch reads into, and it is of another "
                "release",
                "use one vLLM on both sides",
            )
        ranks = self.tp_rank, self.tp_size
        if statement is None:
            peer = read_agent_metadata(self.metadata, self.facts, *ranks)
        else:
            peer = read_statement(statement, self.facts, *ranks)
        reader = self.state.held(Reader)
        if reader is not None:
            # Both grow in other threads; what is on its way is a future.
            booked = tuple(self.worker._remote_agents), tuple(self.worker._handshake_futures)
            reader.keep((*booked[0], *booked[1], peer.engine_id))
        shares_tokens = any(size != 1 for size in self.contexts)
        peer = replace(peer, shares_tokens=shares_tokens, named=named)
        if isinstance(local, UnreadCache) and local.knows_keys:
            told = self._words.get(LAYOUT) if local.mirror_layout else None
            return replace(peer, stated_layout=told)
        if isinstance(local, LocalCache):
            is_open = leaves_open(local.geometry, peer)
            # A block size that is misread says nothing of tiles either.
            if statement is None and (is_open or asks_for_keys(local, peer)):
                peer = replace(peer, stated_keys=order_of(self._words.get(KEYS)))
            if is_open:
                peer = replace(peer, stated_blocks=stated_blocks(self._words))
        return self._with_memory_layout(peer) if statement is None else peer

    def _with_memory_layout(self, peer: AgentMetadata) -> AgentMetadata:
        """Returns the peer with its host buffer's layout, which vLLM's own may state wrongly."""
        release = self.release
        is_open = self.facts.encodes_metadata and release.is_where_mirrors_are
        is_open = is_open and self.state.is_host_buffered and release.memory_layout is not None
        if not is_open or self.worker.use_mla:
            return peer
        told = self._words.get(LAYOUT)
        if told not in ("HND", "NHD"):
            raise PeerRefused(
                f"its host buffer may be vLLM's own, which states {peer.layout} and may have "
                "another layout (<= 0.25)",
                "set ENABLE_KVPATCH there too, or KVPATCH_HOST_BUFFER=auto here",
            )
        return replace(peer, layout=str(told))

    @cached_property
    def _words(self) -> Mapping[str, object]:
        """Returns what the rank answers, its own kvpatch's words among it; asked for once."""
        channels = self.state.of(SideChannels)
        return channels.words(self.metadata.engine_id, self.tp_rank, self.facts)

    def act(self, decision: Decision) -> Any:
        """Carries out a decision: the release adds the peer in the form that was decided.

        Raises:
            PeerRefused: the decision is a refusal.
        """
        if isinstance(decision, PeerRefused):
            raise decision
        named = self.state.of(NamedPeers).accepted
        if named is not None:
            _LOG.info("engine %s is accepted: %s", shown(self.metadata.engine_id), named)
        if decision.open_to:
            self._warn(decision.open_to)
        if isinstance(decision, Read):
            return self._add_heterogeneous(decision.mapping)
        reader, engine_id = self.state.held(Reader), self.metadata.engine_id
        if reader is not None:
            if reader.states:
                book_own_cut(self.worker, reader.ours, engine_id)
            reader.peers.pop(engine_id, None)
        return self.as_release()

    def _warn(self, variables: Sequence[str]) -> None:
        """Warns once of a peer that is taken for a like engine."""
        engine_id = self.metadata.engine_id
        warned = self.state.of(SideChannels).warned
        if engine_id in warned:
            return
        warned[engine_id] = None
        _LOG.warning(
            "engine %s does not say all of its blocks and is taken for an engine like this one: "
            "tokens are wrong where it is another. Set %s on this side to what it has, or "
            "ENABLE_KVPATCH on that side",
            shown(engine_id),
            " and ".join(variables),
        )

    def as_release(self) -> Any:
        """Lets the release add the peer as it is."""
        return self._book(self.wrapped, self.metadata, self.tp_size)

    def _book(self, wrapped: Callable[..., Any], metadata: Any, tp_size: int) -> Any:
        check_descriptors(self.worker, self.facts, metadata)
        agent = wrapped(metadata, self.tp_rank, tp_size, *self.contexts)
        if self.facts.reorders_for_cpu:
            note_peer(self.worker, metadata)
        return agent

    def _add_heterogeneous(self, rank: RemoteRank) -> Any:
        from kvpatch.load.heterogeneous_reads import HeterogeneousReads  # of no like pair

        loads, reader = self.state.held(Loads), self.state.held(Reader)
        if loads is None or reader is None:
            raise PeerRefused(
                "a worker registered its caches anew in the middle of a handshake",
                "send the request again",
            )
        if reader.heterogeneous is None:
            reader.heterogeneous = HeterogeneousReads(self.worker, loads, reader)
        peer = rank.metadata
        with blocks_undivided(self.worker):
            rank.agent = self._add_as_homogeneous(peer, reader.ours)
        reader.heterogeneous.admit(rank)
        told = one_line(f"{shown(peer.engine_id)}: it has {peer}")
        _LOG.info("reading from engine %s; we have %s", told, reader.ours)
        return rank.agent

    def _add_as_homogeneous(self, peer: AgentMetadata, ours: LocalGeometry) -> Any:
        """Shows the release a peer like us in this one's memory, and returns its name to NIXL.

        It shows one block's worth of memory: the release makes descriptors of all that it is shown.
        """
        view = homogeneous_metadata(
            self.metadata,
            peer,
            ours,
            block_bytes_as_ours(ours, peer),
            own_regions(self.worker, self.facts),
            most_blocks=ours.kernel_blocks_per_block,
        )
        book_own_cut(self.worker, ours, peer.engine_id)
        taker, ranks = taken_for_like(self.worker, ours, peer)
        return self._book(bound_to(taker, self.wrapped), view, ranks)
