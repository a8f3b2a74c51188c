"""What a P of another release has, as far as it can be told; what cannot be told is refused."""

from __future__ import annotations

from dataclasses import replace

from kvpatch.connector.handshake.agent_metadata import AgentMetadata
from kvpatch.connector.local.cache_kinds import Holds
from kvpatch.connector.local.local_geometry import LocalGeometry
from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import FACTS, CacheShape
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import LAYER_BY_LAYER

#: The backend whose tensors begin as the table of releases says, and whose blocks none cuts.
FLASH_ATTENTION = "FLASH_ATTN"


def with_cache_shape(ours: LocalGeometry, peer: AgentMetadata, *, is_plain: bool) -> AgentMetadata:
    """A peer of another release with the shape of its tensors, by its release and its regions.

    Args:
        is_plain: whether there are neither windows nor drafted tokens here, and our cache is
            registered as it is.

    Raises:
        PeerRefused: of caches like ours or its, nobody knows what another release makes.
    """
    _check_kinds(ours, peer, is_plain=is_plain)
    if peer.backend != FLASH_ATTENTION or ours.backend != FLASH_ATTENTION:
        raise PeerRefused(
            f"its attention backend is {peer.backend or 'not stated'} and ours {ours.backend}: "
            f"between unlike releases {FLASH_ATTENTION} alone is known",
            "use one vLLM on both sides",
        )
    shape = _shape(peer.releases, len(peer.addresses), len(ours.layers))
    if shape is None:
        raise PeerRefused(
            f"its {len(peer.addresses)} regions of {len(ours.layers)} layers are none of vLLM "
            f"{', '.join(peer.releases)}",
            "use one model and one vLLM on both sides",
        )
    parts = peer.kernel_blocks_per_block or 1  # FlashAttention takes a block of any size whole
    return replace(peer, cache_shape=shape, kernel_blocks_per_block=parts)


def _shape(releases: tuple[str, ...], regions: int, layers: int) -> CacheShape | None:
    """Keys and values that lie apart are two regions of a layer, and others one."""
    found = {
        FACTS[name].cache_shape
        for name in releases
        if regions == layers * (2 if FACTS[name].cache_shape == "keys first" else 1)
    }
    return found.pop() if len(found) == 1 else None


def _check_kinds(ours: LocalGeometry, peer: AgentMetadata, *, is_plain: bool) -> None:
    is_known = (
        is_plain
        and not ours.states
        and ours.groups is None
        and not ours.layers_differ_in_shape
        and ours.key_order is KeyOrder.ROW_MAJOR
        and all(kind.holds is Holds.ROWS for kind in (c.kind for c in ours.layers.values()))
    )
    if not is_known:
        raise PeerRefused(
            "of another release full attention of one shape is read alone, into caches as they "
            "are (no windows, states, drafted tokens, host buffers or caches of other kinds)",
            "use one vLLM on both sides",
        )
    if peer.form is not None or not {ours.layout, peer.layout} <= set(LAYER_BY_LAYER):
        raise PeerRefused(
            f"its layout is {peer.layout} and ours {ours.layout}: between unlike releases those "
            "alone are known whose layers are apart",
            "use layout HND or NHD (LBHNC or LBNHC) on both sides",
        )
    if peer.tp_size != ours.tp_size:
        raise PeerRefused(
            f"it has {peer.tp_size} tensor-parallel ranks and we have {ours.tp_size}",
            "use one --tensor-parallel-size or one vLLM on both sides",
        )
