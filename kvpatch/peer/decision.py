"""The decision of a handshake: the release keeps a peer, kvpatch reads from it, or refuses it.

:func:`decide` is made of values alone; :mod:`kvpatch.load.remote_agents` reads them and acts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.layout_strides import LAYER_BY_LAYER, NAMED_LAYOUTS, inner_layout
from kvpatch.geometry.plane import Plane
from kvpatch.peer.accepted_peers import as_accepted, refuse_other_rows
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import peer_memory, split_by_nobody
from kvpatch.peer.homogeneous_view import has_ranks_unmet, has_replicated_heads
from kvpatch.peer.remote_geometry import kv_split_of_peer, may_be_kvcacheds, peer_regions
from kvpatch.peer.remote_ranks import (
    RemoteRank,
    check_ranks_of_states,
    check_state_sizes,
    is_misread,
    sizes_at_peer,
    states_of_peer,
)
from kvpatch.peer.statement import DeclaredGeometry, check_key_order, complete
from kvpatch.peer.unread_caches import UnreadCache, check_unread
from kvpatch.worker.cache_kinds import Holds
from kvpatch.worker.local_geometry import LocalGeometry

# --- what is decided ------------------------------------------------------------------


@dataclass(frozen=True)
class Stock:
    """The release reads the peer.

    Attributes:
        open_to: the variables that would say what is taken for ours, of a peer that fits a like
            engine and does not say it all.
    """

    open_to: tuple[str, ...] = ()


@dataclass(frozen=True)
class Read:
    """The decision that kvpatch reads from the peer.

    Attributes:
        open_to: as of :class:`Stock`, where like peers are ours to read.
    """

    mapping: RemoteRank
    open_to: tuple[str, ...] = ()


#: A refusal is the error that the handshake ends with: neither the release nor kvpatch can read it.
Decision = Stock | Read | PeerRefused

# --- what it is made of -----------------------------------------------------------------


@dataclass(frozen=True)
class LocalCache:
    """A cache that we read into.

    Attributes:
        geometry: what is registered.
        planes: what reads fill: all of the device's, where that is something else.
        staging_bytes: of the pool that every read goes through; None where they need not.
        reads_all: whether peers like us are ours too.
        hides_ends: whether drafted tokens hide where lists of blocks end.
        is_plain: whether there are neither windows nor drafted tokens.
        has_sure_layout: whether peers on devices like ours have the layout that they state.
        declared: what the operator says of peers.
    """

    geometry: LocalGeometry
    planes: Sequence[Plane]
    staging_bytes: int | None = None
    reads_all: bool = False
    hides_ends: bool = False
    is_plain: bool = True
    has_sure_layout: bool = True
    declared: DeclaredGeometry = DeclaredGeometry()


def decide(local: LocalCache | UnreadCache, remote: AgentMetadata, facts: ReleaseFacts) -> Decision:
    """Decides what becomes of one rank of a peer."""
    if isinstance(local, UnreadCache):
        try:
            check_unread(local, remote, facts)
        except PeerRefused as error:
            reason = f"engine {remote.engine_id!r:.200} cannot be read: {error.reason}"
            return PeerRefused(reason, error.cure)
        return Stock()
    ours, peer = local.geometry, remote
    try:
        peer_memory(ours, peer)  # no read goes to memory of two kinds
        peer = as_accepted(ours, peer, is_plain=local.is_plain and not local.reads_all)
        completed = complete(ours, peer, local.declared)
        peer, is_open = completed.peer, completed.is_open
        if not local.has_sure_layout and peer.layout not in (None, ours.layout):
            raise PeerRefused(
                "the caches of this device have no storage, and a peer on one like it may have "
                "another layout than it states",
                "set ENABLE_KVPATCH there too",
            )
        is_right = is_compatible(ours, peer)
        if is_open and not (is_right and completed.is_like):
            raise PeerRefused(
                "this vLLM's handshake does not say all of its blocks, and they are not like ours",
                f"set {' and '.join(completed.variables)} to what P has, or set ENABLE_KVPATCH on "
                "P",
            )
        is_ours = local.reads_all or is_misread(ours, peer)
        if (is_right and not is_ours) or _is_joined(local, peer, facts):
            check_state_sizes(peer, sizes_at_peer(ours, peer))
            return Stock(completed.variables)
        if local.hides_ends and facts.has_cache_groups and facts.lists_drafted_blocks:
            raise PeerRefused(
                "this vLLM names blocks for drafted tokens too, and with sliding windows alone, or "
                "groups of several shapes, nobody can tell them from the prompt's",
                "speculate without a draft model, use one --block-size, or vLLM 0.25 or later",
            )
        if peer.shares_tokens:
            raise PeerRefused(
                "its ranks share out the tokens of a block",
                "use --decode-context-parallel-size 1 on the prefill side",
            )
        return Read(_mapping_of(local, peer), completed.variables if is_open else ())
    except PeerRefused as error:
        both = f"engine {peer.engine_id} cannot be read: it has {peer}; we have {ours}"
        return PeerRefused(f"{both}; {error.reason}", error.cure)


def _mapping_of(local: LocalCache, peer: AgentMetadata) -> RemoteRank:
    """Returns where a peer's layers lie, and where they overlap ours."""
    from kvpatch.geometry.overlap import overlaps_of  # a like peer needs none of it

    check_ranks_of_states(local.geometry, peer)  # of which cross-layer blocks have other regions
    regions = peer_regions(local.geometry, peer)
    states = states_of_peer(local.geometry, peer)
    overlaps = overlaps_of(regions, local.planes)
    largest = max((overlap.staged_bytes for overlap in overlaps), default=0)
    if local.staging_bytes is not None and largest > local.staging_bytes:
        raise PeerRefused(
            f"one of its blocks takes {largest} bytes of staging pool, which has "
            f"{local.staging_bytes}",
            f"set KVPATCH_STAGING_BYTES to {largest} or more, or KVPATCH_TRANSFER to auto",
        )
    return RemoteRank(peer, tuple(regions), overlaps, states=states)


def _is_joined(local: LocalCache, peer: AgentMetadata, facts: ReleaseFacts) -> bool:
    """True if the release may join a peer's smaller blocks though some of its layers move whole."""
    ours = local.geometry
    whole = [layer.kind for layer in ours.layers.values() if layer.kind.holds is Holds.WHOLE]
    return (
        bool(whole)
        and all(kind.joins for kind in whole)
        and facts.pairs_heads_by_layout
        and not local.reads_all
        and ours.layout in LAYER_BY_LAYER
        and (peer.block_tokens or ours.block_tokens) < ours.block_tokens
        and is_compatible(ours, replace(peer, block_tokens=ours.block_tokens))
    )


# --- which peers the release reads rightly ------------------------------------------------


def is_compatible(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if the release reads this peer rightly: the same blocks, in the same order inside.

    Refuses a peer of which nobody can tell what its blocks hold.
    """
    if ours.planned_layout is not None and peer.layout == ours.planned_layout:
        raise PeerRefused(
            "our allocator has given our tensors another layout than the backend's, and of a peer "
            "that states the backend's nobody knows whether its has too",
            "use one allocator on both sides, and set ENABLE_KVPATCH on P",
        )
    if peer.cache_shape is not None:  # of another release, or a backend with other blocks
        return False
    refuse_other_rows(ours.facts, ours.backend, peer.backend)
    parts, packs_alike = peer.kernel_blocks_per_block, peer.key_order in (None, ours.key_order)
    same_cut = parts in (None, ours.kernel_blocks_per_block)
    # Without heads these two are the same bytes.
    are_latents = not ours.has_heads and {peer.layout, ours.layout} == {"LBHNC", "LBNHC"}
    same_layout = peer.layout in (None, ours.layout) or are_latents
    # Heads of other ranks are one piece of a layer's block in HND only; MLA has none.
    inner = inner_layout(ours.layout) if ours.layout in NAMED_LAYOUTS else ours.inner_layout
    same_heads = peer.tp_size == ours.tp_size or (
        (inner == "HND" or not ours.has_heads)
        and not has_ranks_unmet(ours, peer)
        and not has_replicated_heads(ours, peer)
        and not split_by_nobody(ours, peer)
    )
    same_blocks = peer.block_tokens == ours.block_tokens and same_cut and same_layout and same_heads
    same_split = kv_split_of_peer(ours, peer) in (None, ours.kv_split)
    # Else a CPU's whose processor packs keys otherwise.
    if packs_alike and same_blocks and same_split and not ours.misses_pages:
        return True
    if packs_alike and not same_split and ours.kv_split != "together":
        # By its statement its keys and values are together.
        if peer.layout is None:
            raise PeerRefused(
                "this release's handshake states no layout, which tells heads from tokens where "
                "P's blocks hold keys and values together and ours keep them apart",
                "use kvcached on both sides or on neither, or vLLM 0.10.1 or later",
            )
        cuts: tuple[int, ...] = (parts or 1,)
        if parts is None and ours.kernel_sizes is not None:
            cuts = ours.kernel_sizes.parts(peer.block_tokens or ours.block_tokens)
        if may_be_kvcacheds(peer, cuts):
            raise PeerRefused(
                "its blocks hold keys and values together, or it has kvcached, which would keep "
                "them apart, and no kvpatch to say so: as many blocks come out of kvcached's pages",
                "set ENABLE_KVPATCH on a P with kvcached, and have one without it use another "
                "number of blocks (--num-gpu-blocks-override)",
            )
    check_key_order(ours, peer)
    if parts is None and ours.kernel_sizes is None:
        raise PeerRefused(
            f"{ours.backend} may cut blocks into kernel blocks, and this release's handshake does "
            "not say so",
            "set KVPATCH_PEER_BLOCK_SIZE to the --block-size of P, or ENABLE_KVPATCH on P",
        )
    if peer.backend not in (None, ours.backend):
        raise PeerRefused(
            f"its attention backend is {peer.backend}, ours {ours.backend}",
            "use one on both sides (VLLM_ATTENTION_BACKEND)",
        )
    return False
