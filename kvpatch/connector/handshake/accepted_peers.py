"""Whether a peer that differs in what ``KVPATCH_ACCEPT`` names holds what we take it to hold.

Its hash has said in what it differs, and in nothing else. Engines of releases that mean the same
by what they say to each other are then read as any others are; one whose backend puts the same
rows elsewhere is read by where that one puts them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from kvpatch.connector.handshake.agent_metadata import AgentMetadata
from kvpatch.connector.handshake.other_rows import BY_COLUMN
from kvpatch.connector.handshake.peer_hash.explanation import Explanation
from kvpatch.connector.handshake.peer_hash.factors import BACKEND
from kvpatch.connector.local.cache_kinds import Holds
from kvpatch.connector.local.local_geometry import LocalGeometry
from kvpatch.core.errors import PeerRefused
from kvpatch.core.hash_values import PLAIN_CACHE_DTYPES
from kvpatch.core.releases import FACTS, CacheShape, ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder

#: What both releases must do alike for either to understand the other, and in what words.
ALIKE = {
    "has_cache_groups": "names a request's blocks by cache group",
    "states_kernel_blocks": "says how blocks are cut",
    "grants_leases": "keeps blocks by leases that D renews",
    "names_layouts": "names layouts by all their dimensions",
}


_ALIKE_IN_BOTH = "use one vLLM and one attention backend on both sides"


def as_accepted(ours: LocalGeometry, peer: AgentMetadata, named: Explanation) -> AgentMetadata:
    """A peer of which something is accepted, with how its blocks differ from ours by that.

    Its backend is ours then, as far as anybody asks: what differs by the backend is stated.

    Raises:
        PeerRefused: its bytes mean another thing, or nobody here knows where they lie.
    """
    theirs = FACTS.get(named.release)
    if theirs is None:
        raise PeerRefused(
            f"it runs vLLM {named.version}, which is no release that kvpatch knows",
            "use a listed release on P, or one vLLM on both sides",
        )
    _check_statement(named, peer)
    _check_contents(named, ours)
    _check_protocol(ours, theirs, peer)
    own_form, form = _forms(ours, theirs, named)
    peer = replace(peer, backend=ours.backend)
    if form == own_form:
        return peer
    shape, keys = _shape_and_keys(form)
    return replace(peer, cache_shape=shape, key_order=keys)


def by_its_hash(ours: LocalGeometry, peer: AgentMetadata) -> AgentMetadata:
    """A peer of another release that speaks otherwise, with its release and backend by its hash.

    As it is where no hash was compared.

    Raises:
        PeerRefused: its hash says another thing than its handshake, or nobody here knows.
    """
    named = peer.named
    if named is None:
        return peer
    _check_statement(named, peer)
    _check_contents(named, ours)
    if named.release not in peer.releases:
        raise PeerRefused(
            f"by its hash it runs vLLM {named.version}, and by what it says one of "
            f"{', '.join(peer.releases)}",
            "use one vLLM on both sides",
        )
    return replace(peer, releases=(named.release,), backend=named.backend)


def _check_statement(named: Explanation, peer: AgentMetadata) -> None:
    if peer.backend not in (None, named.backend):
        raise PeerRefused(
            f"by its hash its attention backend is {named.backend}, and its handshake says "
            f"{peer.backend}",
            "use one vLLM on both sides",
        )


def _check_contents(named: Explanation, ours: LocalGeometry) -> None:
    if named.cache_dtype not in PLAIN_CACHE_DTYPES:
        raise PeerRefused(
            f"where scales lie in a cache of {named.cache_dtype} is for each backend and release "
            "to say",
            "use --kv-cache-dtype auto, or one vLLM and one attention backend on both sides",
        )
    if ours.states:
        raise PeerRefused(
            "this model has recurrent state too, and a hash names the backend of one layer alone",
            _ALIKE_IN_BOTH,
        )
    for name, layer in ours.layers.items():
        if layer.kind.holds is not Holds.ROWS:
            raise PeerRefused(
                f"blocks of layer {name} hold {layer.kind.contents}, and of a peer like this one "
                "only rows of tokens are read",
                _ALIKE_IN_BOTH,
            )
    if not ours.backends <= {ours.backend}:
        raise PeerRefused(
            f"layers of this model have the attention backends {', '.join(sorted(ours.backends))}, "
            "and a hash names the first one's alone",
            _ALIKE_IN_BOTH,
        )


def _check_protocol(ours: LocalGeometry, theirs: ReleaseFacts, peer: AgentMetadata) -> None:
    """Whether both releases mean the same by what they say."""
    own = ours.facts
    for name, does in ALIKE.items():
        if getattr(own, name) != getattr(theirs, name):
            which = own if getattr(own, name) else theirs
            raise PeerRefused(
                f"of vLLM {own.release} and {theirs.release} only {which.release} {does}",
                "use one vLLM on both sides",
            )
    if own.generation != theirs.generation and peer.tp_size != ours.tp_size:
        raise PeerRefused(
            f"what vLLM {own.release} tells a P of {theirs.release} of its ranks is not known",
            "use one --tensor-parallel-size or one vLLM on both sides",
        )


def _forms(ours: LocalGeometry, theirs: ReleaseFacts, named: Explanation) -> tuple[str, str]:
    """How our tensors begin and how its do, which hold the same rows of tokens.

    Raises:
        PeerRefused: they do not, or nobody knows how it puts them.
    """
    form, other = ours.facts.form_of(ours.backend), theirs.form_of(named.backend)
    if form is None or other is None or not _are_read(form, other, ours.facts):
        raise PeerRefused(
            f"blocks of {named.backend} in vLLM {theirs.release} are {other or 'not known here'}, "
            f"and those of {ours.backend} in {ours.facts.release} {form or 'not known here'}",
            "use one attention backend on both sides (--attention-backend)",
        )
    if BACKEND in named.factors and not ours.facts.states_kernel_blocks:
        raise PeerRefused(
            "this release's handshake does not say how a backend cuts its blocks",
            "use one attention backend on both sides, or vLLM 0.21 or later",
        )
    return form, other


def _are_read(form: str, other: str, facts: ReleaseFacts) -> bool:
    """Whether two forms are one, or rows of tokens of which a layout's name says where they lie."""
    shapes = {one.removesuffix(BY_COLUMN) for one in (form, other)}
    return form == other or (shapes == {"packed"} and facts.names_layouts)


def _shape_and_keys(form: str) -> tuple[CacheShape, KeyOrder]:
    """What the table of releases says of a form of rows; a processor with AMX has its tiles."""
    shape = form.removesuffix(BY_COLUMN)
    by_column = form.endswith(BY_COLUMN)
    keys = KeyOrder.COLUMN_MAJOR if by_column else KeyOrder.ROW_MAJOR
    return next(one for one in get_args(CacheShape) if one == shape), keys
