"""Whether a peer is left to the release, read by us, or refused: the decision of a handshake.

:func:`decide` is made of values alone; :mod:`kvpatch.connector.peer_handshake` reads them and acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpatch.connector.handshake.agent_metadata import AgentMetadata
from kvpatch.connector.handshake.homogeneous_view import has_ranks_unmet
from kvpatch.connector.handshake.kv_head_replication import has_replicated_heads
from kvpatch.connector.handshake.possible_geometries import (
    DeclaredGeometry,
    GeometryName,
    PossibleGeometries,
    possible_geometries,
)
from kvpatch.connector.handshake.remote_geometry import peer_regions
from kvpatch.connector.handshake.remote_ranks import RemoteRank
from kvpatch.connector.handshake.remote_states import states_of_peer
from kvpatch.connector.handshake.split_kv import kv_split_of_peer, may_be_kvcacheds
from kvpatch.connector.handshake.whole_blocks import check_blocks, split_by_nobody, unknown_kind
from kvpatch.connector.local.cache_kinds import RING, Holds, Kind
from kvpatch.connector.local.local_geometry import LocalGeometry
from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry import (
    LAYER_BY_LAYER,
    NAMED_LAYOUTS,
    KeyOrder,
    Plane,
    inner_layout,
    overlaps_of,
)

# --- what is decided ------------------------------------------------------------------


@dataclass(frozen=True)
class Stock:
    """The release reads the peer.

    Attributes:
        peer: what it states, completed; None where nobody here looks at it.
    """

    peer: AgentMetadata | None = None


@dataclass(frozen=True)
class Read:
    """We read the peer."""

    mapping: RemoteRank


@dataclass(frozen=True)
class Prove:
    """The peer may be one of several for all that it says, and its blocks have to show which.

    Attributes:
        mappings: by the name of each that can be read; one at least.
        refusals: by the name of each other.
        stock: the one of `mappings` that the release reads; None for none.
    """

    mappings: Mapping[GeometryName, RemoteRank]
    refusals: Mapping[GeometryName, Refuse]
    stock: GeometryName | None = None


@dataclass(frozen=True)
class Refuse:
    """Nobody here can read the peer.

    Attributes:
        reason: both geometries, and what keeps one from the other.
        cure: what would help.
    """

    reason: str
    cure: str = ""

    @property
    def error(self) -> PeerRefused:
        """What the release makes a failed handshake of."""
        return PeerRefused(self.reason, self.cure)


Decision = Stock | Read | Prove | Refuse

# --- what it is made of -----------------------------------------------------------------


@dataclass(frozen=True)
class LocalCache:
    """A cache that we read into.

    Attributes:
        geometry: what is registered.
        planes: what reads fill: all of the device's, where that is something else.
        staging_bytes: of the pool that every read goes through; None where they need not.
        reads_all: whether peers like us are ours too.
        is_shown: whether the release was shown other tensors than there are.
        hides_ends: whether drafted tokens hide where lists of blocks end.
        has_sure_layout: whether peers on devices like ours have the layout that they state.
        declared: what the operator says of peers.
        misreads_smaller: why the release reads no request of smaller blocks rightly; empty: it
            does some.
    """

    geometry: LocalGeometry
    planes: Sequence[Plane]
    staging_bytes: int | None = None
    reads_all: bool = False
    is_shown: bool = False
    hides_ends: bool = False
    has_sure_layout: bool = True
    declared: DeclaredGeometry = DeclaredGeometry()
    misreads_smaller: Callable[[], str] = str


@dataclass(frozen=True)
class UnreadCache:
    """A cache that we do not read into: the release alone does.

    Attributes:
        needs_reader: whether its host buffer needs us to.
        knows_keys: whether anybody knows how keys lie in a block.
        has_heads: whether ranks hold heads; the latents of MLA are whole on each.
        kinds: of its layers.
        misreads_smaller: as of :class:`LocalCache`.
    """

    block_tokens: int
    tp_size: int
    layout: str | None
    backend: str
    needs_reader: bool = False
    knows_keys: bool = True
    has_heads: bool = True
    kinds: Callable[[], Mapping[str, Kind]] = dict
    misreads_smaller: Callable[[], str] = str


@dataclass(frozen=True)
class UncheckedMetadata:
    """What a cache that we do not read into asks of a peer's metadata; the release checks it."""

    engine_id: str
    tp_size: int
    block_tokens: Any
    layout: Any


Metadata = AgentMetadata | UncheckedMetadata


def decide(local: LocalCache | UnreadCache, remote: Metadata, facts: ReleaseFacts) -> Decision:
    """What becomes of one rank of a peer."""
    if isinstance(local, UnreadCache):
        return _of_unread(local, remote, facts)
    if isinstance(remote, UncheckedMetadata):
        return Stock()
    return _of_read(local, remote, facts)


def _of_read(local: LocalCache, peer: AgentMetadata, facts: ReleaseFacts) -> Decision:
    ours = local.geometry
    try:
        has_plain_states = bool(ours.states) and peer.form is None and not local.is_shown
        if has_plain_states and peer.tp_size != ours.tp_size:  # which the release alone splits
            check_blocks(ours, peer)
            _check_smaller(peer, ours.block_tokens, local.misreads_smaller)
            return Stock()
        if ours.misreads_blocks:
            peer = replace(peer, block_tokens=None)
        possible = possible_geometries(ours, peer, local.declared)
        peer = possible.completed[0]
        if not local.has_sure_layout and peer.layout not in (None, ours.layout):
            raise PeerRefused(
                "the caches of this device have no storage, and a peer on one like it may have "
                "another layout than it states",
                "set ENABLE_KVPATCH there too",
            )
        if possible.is_open:
            return _to_prove(local, possible, facts)
        if is_like(ours, peer) and not local.reads_all:
            return Stock(peer)
        if _is_joined(local, peer, facts):
            return Stock(peer)
        _check_block_lists(local, peer, facts)
        return Read(mapping_of(local, peer))
    except PeerRefused as error:
        return with_both_geometries(ours, peer, error)


def with_both_geometries(ours: LocalGeometry, peer: AgentMetadata, error: PeerRefused) -> Refuse:
    """With both geometries before the reason."""
    both = f"engine {peer.engine_id} cannot be read: it has {peer}; we have {ours}"
    return Refuse(f"{both}; {error.reason}", error.cure)


def _to_prove(
    local: LocalCache, possible: PossibleGeometries, facts: ReleaseFacts
) -> Prove | Refuse:
    mappings: dict[GeometryName, RemoteRank] = {}
    refusals: dict[GeometryName, Refuse] = {}
    stock: GeometryName | None = None
    for name, peer in possible.named.items():
        try:
            is_stock = is_like(local.geometry, peer) and not local.reads_all
            if not is_stock:
                _check_block_lists(local, peer, facts)
            mappings[name] = mapping_of(local, peer)
        except PeerRefused as error:
            refusals[name] = with_both_geometries(local.geometry, peer, error)
            continue
        if is_stock:
            stock = name
    if not mappings:
        return next(iter(refusals.values()))
    return Prove(mappings, refusals, stock)


def mapping_of(local: LocalCache, peer: AgentMetadata) -> RemoteRank:
    """Where a peer's layers lie, and where they overlap ours.

    Raises:
        PeerRefused: it cannot be read.
    """
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
    planes = tuple(plane for region in regions for plane in region)
    return RemoteRank(peer, planes, overlaps, states=states)


def _is_joined(local: LocalCache, peer: AgentMetadata, facts: ReleaseFacts) -> bool:
    """Whether the release joins smaller blocks of whose layers some move whole, but for that.

    Raises:
        PeerRefused: it would be read by nobody whatever its blocks.
    """
    ours = local.geometry
    whole = [layer.kind for layer in ours.layers.values() if layer.kind.holds is Holds.WHOLE]
    return (
        bool(whole)
        and all(kind.joins for kind in whole)
        and facts.pairs_heads_by_layout
        and not (local.reads_all or local.is_shown)
        and ours.layout in LAYER_BY_LAYER
        and _is_smaller(peer, ours.block_tokens)
        and is_like(ours, replace(peer, block_tokens=ours.block_tokens))
    )


def _check_block_lists(local: LocalCache, peer: AgentMetadata, facts: ReleaseFacts) -> None:
    """Whether the lists of blocks that a heterogeneous peer names are lists of ours.

    Raises:
        PeerRefused: they end nobody knows where, or ranks share out a block's tokens.
    """
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


# --- a peer like us -------------------------------------------------------------------


def is_like(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """Whether the release reads this peer rightly: the same blocks, the same order in them.

    Raises:
        PeerRefused: it cannot be read by anybody here.
    """
    if ours.planned_layout is not None and peer.layout == ours.planned_layout:
        raise PeerRefused(
            "our allocator has given our tensors another layout than the backend's, and of a peer "
            "that states the backend's nobody knows whether its has too",
            "use one allocator on both sides, and set ENABLE_KVPATCH on P",
        )
    same_split = kv_split_of_peer(ours, peer) in (None, ours.kv_split)
    if _has_same_blocks(ours, peer) and same_split and not ours.misses_pages:
        return True
    if not same_split:
        _refuse_unproven_split(ours, peer)
    _refuse_undecidable(ours, peer)
    return False


def _has_same_blocks(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    same_tokens = peer.block_tokens == ours.block_tokens and (
        peer.kernel_blocks_per_block in (None, ours.kernel_blocks_per_block)
    )
    same_layout = peer.layout in (None, ours.layout) or _has_same_bytes(ours, peer)
    # Heads of other ranks are one piece of a layer's block in HND only; MLA has none.
    same_heads = peer.tp_size == ours.tp_size or (
        (_has_heads_in_pieces(ours) or not ours.has_heads)
        and not has_ranks_unmet(ours, peer)
        and not has_replicated_heads(ours, peer)
        and not split_by_nobody(ours, peer)
    )
    return same_tokens and same_layout and same_heads


def _has_same_bytes(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """Whether two names of layouts are the same bytes: without heads, heads and tokens have none.

    Releases look at neither's name there.
    """
    return not ours.has_heads and {peer.layout, ours.layout} == {"LBHNC", "LBNHC"}


def _has_heads_in_pieces(ours: LocalGeometry) -> bool:
    if ours.layout in NAMED_LAYOUTS:
        return inner_layout(ours.layout) == "HND"
    return ours.inner_layout == "HND"


# --- what nobody can tell of a peer of another geometry ------------------------------------


def _refuse_undecidable(ours: LocalGeometry, peer: AgentMetadata) -> None:
    if ours.key_order is KeyOrder.COLUMN_MAJOR and ours.item_bytes != 4:
        raise PeerRefused(
            "a CPU with AMX tiles keys of 2 bytes where the block size allows, and the handshake "
            "does not say so",
            "use --dtype float32, or one block size on both sides",
        )
    if peer.kernel_blocks_per_block is None and ours.kernel_sizes is None:
        raise PeerRefused(
            f"{ours.backend} may cut blocks into kernel blocks, and this release's handshake does "
            "not say so",
            "use one --block-size on both sides, or vLLM 0.21 or later",
        )
    if peer.backend not in (None, ours.backend):
        raise PeerRefused(
            f"its attention backend is {peer.backend}, ours {ours.backend}",
            "use one on both sides (VLLM_ATTENTION_BACKEND)",
        )


def _refuse_unproven_split(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Refuses a peer whose keys and values are together by its statement, and may not be.

    Raises:
        PeerRefused: with what would tell.
    """
    if ours.kv_split == "together":
        return
    if peer.layout is None:
        raise PeerRefused(
            "this release's handshake states no layout, which tells heads from tokens where P's "
            "blocks hold keys and values together and ours keep them apart",
            "use kvcached on both sides or on neither, or vLLM 0.10.1 or later",
        )
    parts: tuple[int, ...] = (peer.kernel_blocks_per_block or 1,)
    if peer.kernel_blocks_per_block is None and ours.kernel_sizes is not None:
        parts = ours.kernel_sizes.parts(peer.block_tokens or ours.block_tokens)
    if may_be_kvcacheds(peer, parts):
        raise PeerRefused(
            "its blocks hold keys and values together, or it has kvcached, which would keep them "
            "apart, and no kvpatch to say so",
            "as many blocks come out of kvcached's pages. Set ENABLE_KVPATCH on a P with kvcached, "
            "and have one without it use another number of blocks (--num-gpu-blocks-override)",
        )


# --- a cache that the release alone reads ---------------------------------------------------


def _of_unread(local: UnreadCache, remote: Metadata, facts: ReleaseFacts) -> Decision:
    try:
        _check_unread(local, remote, facts)
    except PeerRefused as error:
        return Refuse(
            f"engine {remote.engine_id!r:.200} cannot be read: {error.reason}", error.cure
        )
    return Stock()


def _check_unread(local: UnreadCache, remote: Metadata, facts: ReleaseFacts) -> None:
    """Whether the release reads the peer rightly.

    Raises:
        PeerRefused: it would copy packed keys as if they were rows, cut what moves whole, or
            pair smaller blocks wrongly.
    """
    if local.needs_reader:
        raise PeerRefused(
            "this engine's cache is not one that kvpatch reads into (keys in tiles, context "
            "parallelism), and its host buffer needs that",
            "use KVPATCH_HOST_BUFFER=never",
        )
    same_tokens = remote.block_tokens in (None, local.block_tokens)
    same_layout = remote.layout in (None, local.layout)
    if not local.knows_keys and not (same_tokens and same_layout):
        raise PeerRefused(
            f"it has {remote}; we have blocks of {local.block_tokens} tokens, layout "
            f"{local.layout}, in which the backend {local.backend} packs keys by rules of its own",
            "use one block size and layout on both sides",
        )
    if not (same_tokens and same_layout and remote.tp_size == local.tp_size):
        # Of what joins, releases <= 0.28 register no engine, and <= 0.31 join it wrongly.
        joins = facts.pairs_heads_by_layout and _is_smaller(remote, local.block_tokens)
        for layer, kind in local.kinds().items():
            has_tokens = same_tokens or (kind.joins and joins)
            _check_uncut(local, remote, layer, kind, same_tokens=has_tokens)
    if local.knows_keys:
        _check_smaller(remote, local.block_tokens, local.misreads_smaller)


def _check_uncut(
    local: UnreadCache, remote: Metadata, layer: str, kind: Kind, *, same_tokens: bool
) -> None:
    """Whether the release reads blocks of a layer whole.

    What has no heads is whole on every rank, and the release reads it so, but for a ring (up to
    0.33 at least): that has the region of the layer in whose place it lies, and a D of more ranks
    than P reads the share of it that is a rank's of that layer's.

    Raises:
        PeerRefused: it would cut them.
    """
    if not kind.is_known:
        raise unknown_kind(layer, kind)
    if kind.holds is not Holds.WHOLE:
        return
    contents = f"blocks of layer {layer} hold {kind.contents}"
    if not same_tokens:
        raise PeerRefused(f"{contents}, and move whole", "use one block size")
    if local.has_heads and kind.mixes_heads and remote.tp_size != local.tp_size:
        raise PeerRefused(
            f"{contents}, and move whole, never a share of their heads",
            "use one --tensor-parallel-size on both sides",
        )
    if local.has_heads and kind == RING and remote.tp_size < local.tp_size:
        raise PeerRefused(
            f"{contents}, of which this vLLM reads a share where P has fewer ranks",
            "use one --tensor-parallel-size on both sides",
        )


def _is_smaller(remote: Metadata, block_tokens: int) -> bool:
    theirs = remote.block_tokens
    return isinstance(theirs, int) and theirs < block_tokens


def _check_smaller(
    remote: Metadata, block_tokens: int, misreads_smaller: Callable[[], str]
) -> None:
    """Whether the release reads some request of a peer of smaller blocks rightly.

    Raises:
        PeerRefused: it reads none.
    """
    reason = misreads_smaller() if _is_smaller(remote, block_tokens) else ""
    if reason:
        raise PeerRefused(
            f"its blocks have {remote.block_tokens} tokens, ours {block_tokens}, this engine's "
            "cache is not one that kvpatch reads into (a host buffer, context parallelism, layers "
            "that share caches, or recurrent state in layout BLHNC or over other numbers of "
            f"ranks), and this vLLM {reason}",
            "use one --block-size on both sides",
        )
