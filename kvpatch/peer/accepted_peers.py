"""The cache of a peer that differs in what ``KVPATCH_ACCEPT`` names: its release, its backend.

Its hash, or the fields of its answer, have said in what it differs. Engines that mean the same by
what they say to each other are then read as any others are; one that puts the same rows elsewhere
is read by where its release and its backend put them. What nobody here can tell is refused.
"""

from __future__ import annotations

from dataclasses import replace

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import FACTS, ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import LAYER_BY_LAYER
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.peer_hash import Explanation
from kvpatch.worker.cache_kinds import PLAIN_CACHE_DTYPES, Holds
from kvpatch.worker.local_geometry import LocalGeometry

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


def refuse_other_rows(facts: ReleaseFacts, own_backend: str, backend: object) -> None:
    """Refuses a peer without a compared hash whose rows the release would take for ours.

    What it reads into a CPU's cache it reorders itself, or ends by it. Keys by column are in no
    other cache, known to the table of releases or not.
    """
    own, theirs = facts.form_of(own_backend), facts.form_of(backend)
    if theirs is None or own == theirs:
        return
    is_reordered = own is not None and own.by_column and not facts.ends_by_reordering
    if not is_reordered and (own is not None or theirs.by_column):
        raise PeerRefused(
            f"its attention backend is {backend}, whose blocks are {theirs}, and ours "
            f"{own_backend}, whose blocks are {own or 'rows, or not known here'}",
            "set KVPATCH_ACCEPT=attn_backend here, and leave enforce_handshake_compat on, which "
            "has its hash compared, or use one attention backend on both sides",
        )
