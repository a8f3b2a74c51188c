"""The decision of a handshake: the release keeps a peer, kvpatch reads from it, or refuses it.

:func:`decide` is made of values alone; :mod:`kvpatch.load.remote_agents` reads them and acts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import FACTS, ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import LAYER_BY_LAYER, NAMED_LAYOUTS, inner_layout
from kvpatch.geometry.plane import Plane
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import (
    has_copies,
    has_one_head,
    has_ranks_unmet,
    has_replicated_heads,
    has_unlike_shares,
    kv_split_of_peer,
    may_be_kvcacheds,
    peer_memory,
    refuse_other_rows,
    split_by_nobody,
)
from kvpatch.peer.peer_hash import Explanation
from kvpatch.peer.remote_geometry import peer_regions
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
from kvpatch.worker.cache_kinds import PLAIN_CACHE_DTYPES, Holds
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
        stages: the stages of this engine's pipeline, each of which has some of the layers.
    """

    geometry: LocalGeometry
    planes: Sequence[Plane]
    staging_bytes: int | None = None
    reads_all: bool = False
    hides_ends: bool = False
    is_plain: bool = True
    has_sure_layout: bool = True
    declared: DeclaredGeometry = DeclaredGeometry()
    stages: int = 1


def decide(local: LocalCache | UnreadCache, remote: AgentMetadata, facts: ReleaseFacts) -> Decision:
    """Decides what becomes of one rank of a peer."""
    if local.stages > 1 and not facts.names_regions:
        return PeerRefused(
            f"engine {remote.engine_id!r:.200} cannot be read: this engine has {local.stages} "
            "pipeline stages, and vLLM before 0.30 has all of them read one and the same stage of "
            "P, or has P free its blocks once one of them has read",
            "use --pipeline-parallel-size 1 on the decode side",
        )
    if isinstance(local, UnreadCache):
        try:
            check_unread(local, remote, facts)
        except PeerRefused as error:
            reason = f"engine {remote.engine_id!r:.200} cannot be read: {error.reason}"
            return PeerRefused(reason, error.cure)
        return Stock()
    ours, peer = local.geometry, remote
    if local.stages > 1:  # P has the layers of all of our stages
        peer = peer.of_layers(ours.region_names or ())
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
        joins = not is_open and _may_join(local, peer, facts)
        is_right = is_compatible(ours, peer, joins=joins)
        if is_open and not (is_right and completed.is_like):
            raise PeerRefused(
                "this vLLM's handshake does not say all of its blocks, and they are not like ours",
                f"set {' and '.join(completed.variables)} to what P has, or set ENABLE_KVPATCH on "
                "P",
            )
        is_ours = local.reads_all or (is_misread(ours, peer) and not joins)
        if is_right and not is_ours:
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
        check_ranks_of_states(ours, peer)  # of which cross-layer blocks have other regions
        return Read(_mapping_of(local, peer), completed.variables if is_open else ())
    except PeerRefused as error:
        both = f"engine {peer.engine_id} cannot be read: it has {peer}; we have {ours}"
        return PeerRefused(f"{both}; {error.reason}", error.cure)


def _mapping_of(local: LocalCache, peer: AgentMetadata) -> RemoteRank:
    """Returns where a peer's layers lie, and where they overlap ours."""
    from kvpatch.geometry.overlap import overlaps_of  # a like peer needs none of it

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


def _may_join(local: LocalCache, peer: AgentMetadata, facts: ReleaseFacts) -> bool:
    """True if the release may join a peer's smaller blocks, of which we cannot tell all heads.

    Some of its layers move whole, or a draft model's have other heads, on fewer ranks than ours,
    or beside MLA on more that have the draft whole.
    """
    ours = local.geometry
    whole = [layer.kind for layer in ours.layers.values() if layer.kind.holds is Holds.WHOLE]
    has_draft = ours.layers_differ_in_shape and (ours.groups is None or ours.has_draft)
    # Beside latents the release finds what each rank has whole, and from 0.33 on a rank's share,
    # whose heads it leaves in the order of P's blocks.
    finds_share = facts.shares_draft_heads and _has_single_heads(ours)
    are_copies = ours.uses_mla and has_copies(ours, peer) and peer.tp_size != ours.tp_size
    is_share = not ours.has_latents or (ours.uses_mla and finds_share)
    is_joined = are_copies or (is_share and peer.tp_size < ours.tp_size)
    return (
        (bool(whole) or (has_draft and is_joined))
        and all(kind.joins for kind in whole)
        and facts.pairs_heads_by_layout
        and not local.reads_all
        and (ours.layout in LAYER_BY_LAYER or ours.layout == "BLHNC")
        and ours.key_order is KeyOrder.ROW_MAJOR  # it joins rows
        and (peer.block_tokens or ours.block_tokens) < ours.block_tokens
    )


def _has_single_heads(ours: LocalGeometry) -> bool:
    return {own for _, own in ours.heads_of_layers} == {1}


# --- which peers the release reads rightly ------------------------------------------------


def is_compatible(ours: LocalGeometry, peer: AgentMetadata, *, joins: bool = False) -> bool:
    """True if the release reads this peer rightly: the same blocks, in the same order inside.

    Refuses a peer of which nobody can tell what its blocks hold.

    Args:
        joins: True if the release joins the peer's blocks, which are smaller.
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
    # Beside MLA a draft model's may be whole on each rank.
    are_copies = ours.uses_mla and has_copies(ours, peer)
    # Single heads are, too, and beside MLA the release compares no layouts.
    are_single = ours.has_heads and _has_single_heads(ours)
    are_apart = {peer.layout, ours.layout} <= set(LAYER_BY_LAYER)
    are_same_bytes = are_latents or (are_copies and are_single and are_apart)
    same_layout = peer.layout in (None, ours.layout) or are_same_bytes
    # Heads of other ranks are one piece of a layer's block in HND, and where they are alone.
    inner = inner_layout(ours.layout) if ours.layout in NAMED_LAYOUTS else ours.inner_layout
    same_heads = peer.tp_size == ours.tp_size or (
        (inner == "HND" or not ours.has_heads or are_copies or has_one_head(ours, peer))
        and not has_ranks_unmet(ours, peer)
        and not has_replicated_heads(ours, peer)
        and not has_unlike_shares(ours, peer)
        and not split_by_nobody(ours, peer)
    )
    same_tokens = joins or peer.block_tokens == ours.block_tokens
    same_blocks = same_tokens and same_cut and same_layout and same_heads
    same_split = kv_split_of_peer(ours, peer) in (None, ours.kv_split)
    # Else a CPU's whose processor packs keys otherwise.
    is_like = packs_alike and same_blocks and same_split and not ours.misses_pages
    if is_like and not joins:
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
    return is_like  # True of a joined one alone


# --- peers that differ in what KVPATCH_ACCEPT names: their release, their backend ------------
#
# Their hash, or the fields of their answer, have said in what they differ. Engines that mean the
# same by what they say to each other are then read as any others are; one that puts the same rows
# elsewhere is read by where its release and its backend put them. What nobody here can tell is
# refused.

#: What both releases must do alike for either to understand the other, and in what words.
ALIKE = {
    "has_cache_groups": "names a request's blocks by cache group",
    "states_kernel_blocks": "says how blocks are cut",
    "grants_leases": "keeps blocks by leases that D renews",
    "names_layouts": "names layouts by all their dimensions",
}
#: The backend that is known between releases which speak otherwise: it cuts no blocks.
FLASH_ATTENTION = "FLASH_ATTN"

_ONE_VLLM = "use one vLLM on both sides"
_ALIKE_IN_BOTH = "use one vLLM and one attention backend on both sides"
_ONE_BACKEND = "use one attention backend on both sides"
_ONE_SIZE = "use one --tensor-parallel-size or one vLLM on both sides"


def as_accepted(ours: LocalGeometry, peer: AgentMetadata, *, is_plain: bool) -> AgentMetadata:
    """Returns a peer with how its blocks differ from ours, where it is accepted, or refuses it.

    Args:
        is_plain: True if there are neither windows nor drafted tokens here, and our cache is
            registered as it is.
    """
    named = peer.named
    if named is not None:
        if peer.backend not in (None, named.backend):
            raise PeerRefused(
                f"by its hash its attention backend is {named.backend}, and its handshake says "
                f"{peer.backend}",
                _ONE_VLLM,
            )
        if named.cache_dtype not in PLAIN_CACHE_DTYPES:
            raise PeerRefused(
                f"where scales lie in a cache of {named.cache_dtype} is for each backend and "
                "release to say",
                "use --kv-cache-dtype auto, or one vLLM and one attention backend on both sides",
            )
        if ours.states:
            raise PeerRefused(
                "this model has recurrent state too, and a hash names the backend of one layer "
                "alone",
                _ALIKE_IN_BOTH,
            )
        for name, layer in ours.layers.items():
            if layer.kind.holds is not Holds.ROWS:
                raise PeerRefused(
                    f"blocks of layer {name} hold {layer.kind.contents}, and of a peer like this "
                    "one only rows of tokens are read",
                    _ALIKE_IN_BOTH,
                )
        if not ours.backends <= {ours.backend}:
            raise PeerRefused(
                "layers of this model have the attention backends "
                f"{', '.join(sorted(ours.backends))}, and a hash names the first one's alone",
                _ALIKE_IN_BOTH,
            )
    if peer.releases:
        return _of_other_release(ours, peer, is_plain=is_plain)
    return peer if named is None else _of_named(ours, peer, named)


def _of_named(ours: LocalGeometry, peer: AgentMetadata, named: Explanation) -> AgentMetadata:
    """Returns a peer whose backend counts as ours: what differs by the backend is stated."""
    own, theirs = ours.facts, FACTS[named.release]
    for name, does in ALIKE.items():
        if getattr(own, name) != getattr(theirs, name):
            which = own if getattr(own, name) else theirs
            raise PeerRefused(
                f"of vLLM {own.release} and {theirs.release} only {which.release} {does}", _ONE_VLLM
            )
    if own.generation != theirs.generation and peer.tp_size != ours.tp_size:
        raise PeerRefused(
            f"what vLLM {own.release} tells a P of {theirs.release} of its ranks is not known",
            _ONE_SIZE,
        )
    has_draft_model = any(name.startswith("draft_model.") for name in ours.layers)
    if own.names_regions != theirs.names_regions and has_draft_model:
        # <= 0.29 the target's regions are first; from 0.30 on they are in the order of names.
        raise PeerRefused(
            f"vLLM {own.release} and {theirs.release} number the layers of a model and of its "
            "draft model (speculative method draft_model) in two orders",
            _ONE_VLLM,
        )
    own_form, form = own.form_of(ours.backend), theirs.form_of(named.backend)
    # Of rows that are packed a layout's name says where they lie.
    is_named = own.names_layouts and {f and f.shape for f in (own_form, form)} == {"packed"}
    if own_form is None or form is None or not (own_form == form or is_named):
        raise PeerRefused(
            f"blocks of {named.backend} in vLLM {theirs.release} are {form or 'not known here'}, "
            f"and those of {ours.backend} in {own.release} {own_form or 'not known here'}",
            f"{_ONE_BACKEND} (--attention-backend)",
        )
    if "attn_backend" in named.factors and not own.states_kernel_blocks:
        raise PeerRefused(
            "this release's handshake does not say how a backend cuts its blocks",
            f"{_ONE_BACKEND}, or vLLM 0.21 or later",
        )
    peer = replace(peer, backend=ours.backend)
    if form == own_form or form.shape == "latents":
        return peer
    keys = KeyOrder.COLUMN_MAJOR if form.by_column else KeyOrder.ROW_MAJOR
    return replace(peer, cache_shape=form.shape, key_order=keys)


def _of_other_release(ours: LocalGeometry, peer: AgentMetadata, *, is_plain: bool) -> AgentMetadata:
    """Returns a peer of another release with the shape of its tensors."""
    named = peer.named
    if named is not None:
        if named.release not in peer.releases:
            raise PeerRefused(
                f"by its hash it runs vLLM {named.version}, and by what it says one of "
                f"{', '.join(peer.releases)}",
                _ONE_VLLM,
            )
        peer = replace(peer, releases=(named.release,), backend=named.backend)
    is_known = (
        is_plain
        and not ours.states
        and ours.groups is None
        and not ours.layers_differ_in_shape
        and ours.key_order is KeyOrder.ROW_MAJOR
        and all(layer.kind.holds is Holds.ROWS for layer in ours.layers.values())
    )
    if not is_known:
        raise PeerRefused(
            "of another release full attention of one shape is read alone, into caches as they "
            "are (no windows, states, drafted tokens, host buffers or caches of other kinds)",
            _ONE_VLLM,
        )
    if peer.form is not None or not {ours.layout, peer.layout} <= set(LAYER_BY_LAYER):
        raise PeerRefused(
            f"its layout is {peer.layout} and ours {ours.layout}: between unlike releases those "
            "alone are known whose layers are apart",
            "use layout HND or NHD (LBHNC or LBNHC) on both sides",
        )
    if peer.tp_size != ours.tp_size:
        raise PeerRefused(
            f"it has {peer.tp_size} tensor-parallel ranks and we have {ours.tp_size}", _ONE_SIZE
        )
    if peer.backend != FLASH_ATTENTION or ours.backend != FLASH_ATTENTION:
        raise PeerRefused(
            f"its attention backend is {peer.backend or 'not stated'} and ours {ours.backend}: "
            f"between unlike releases {FLASH_ATTENTION} alone is known",
            _ONE_VLLM,
        )
    # Keys and values that lie apart are two regions of a layer, and others one.
    regions, layers = len(peer.addresses), len(ours.layers)
    shapes = {FACTS[name].cache_shape for name in peer.releases}
    fit = [one for one in shapes if regions == layers * (2 if one == "keys first" else 1)]
    if len(fit) != 1:
        raise PeerRefused(
            f"its {regions} regions of {layers} layers are none of vLLM {', '.join(peer.releases)}",
            "use one model and one vLLM on both sides",
        )
    parts = peer.kernel_blocks_per_block or 1  # FlashAttention takes a block of any size whole
    return replace(peer, cache_shape=fit[0], kernel_blocks_per_block=parts)
