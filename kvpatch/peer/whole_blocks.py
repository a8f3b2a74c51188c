"""Blocks that move whole or not at all: whether a peer has them as we do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpatch.core.errors import PeerRefused, UnplannableCopy
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.plane_copies import check_whole
from kvpatch.peer.block_shapes import heads_of
from kvpatch.worker.cache_kinds import Kind
from kvpatch.worker.registered_caches import LayerCache

if TYPE_CHECKING:
    from kvpatch.peer.agent_metadata import AgentMetadata
    from kvpatch.worker.local_geometry import LocalGeometry


def check_blocks(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Whether a peer's kernel blocks have as many tokens as ours, and heads, where ours move whole.

    Raises:
        PeerRefused: they have not.
    """
    _check_known(ours, peer)
    if split_by_nobody(ours, peer):
        mixed = next(n for n, layer in ours.layers.items() if layer.kind.mixes_heads)
        raise PeerRefused(
            f"blocks of layer {mixed} hold {ours.layers[mixed].kind.contents}, and move whole, "
            "never a share of their heads",
            "use one --tensor-parallel-size on both sides",
        )
    if peer.block_tokens in (None, ours.block_tokens):
        return
    for name, layer in ours.layers.items():
        if _is_whole(layer):
            raise PeerRefused(
                f"blocks of layer {name} hold {layer.kind.contents}, and move whole: both sides "
                f"need kernel blocks of one size, {peer.block_tokens} or {ours.block_tokens} "
                "tokens",
                "use one --block-size and one attention backend",
            )


def _check_known(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """What the table of kinds lacks is read from peers like us alone (behind a host buffer)."""
    is_like = (
        peer.tp_size == ours.tp_size
        and peer.block_tokens in (None, ours.block_tokens)
        and peer.kernel_blocks_per_block in (None, ours.kernel_blocks_per_block)
        and peer.layout in (None, ours.layout)
    )
    for name, layer in ours.layers.items():
        if not layer.kind.is_known and not is_like:
            raise unknown_kind(name, layer.kind)


def unknown_kind(layer: str, kind: Kind) -> PeerRefused:
    """Why a heterogeneous peer is refused, and what helps."""
    return PeerRefused(
        f"blocks of layer {layer} hold {kind.contents}, which is read from engines alike alone",
        "use one --block-size, --tensor-parallel-size and VLLM_KV_CACHE_LAYOUT on both sides",
    )


def split_by_nobody(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """Whether blocks of one side hold those of several ranks of the other, their heads mixed."""
    _, own = heads_of(ours.total_heads, ours.tp_rank, ours.tp_size)
    _, others = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    kinds = [layer.kind for layer in ours.layers.values()]
    return own != others and any(kind.mixes_heads or not kind.is_known for kind in kinds)


def check_planes(ours: LocalGeometry, theirs: Sequence[Plane]) -> None:
    """Whether a peer's blocks are ours byte for byte, where ours move whole.

    Raises:
        PeerRefused: they are not: other heads, or other layouts.
    """
    found = defaultdict(list)
    for plane in theirs:
        found[plane.layer, plane.content].append(plane)
    for name, layer in ours.layers.items():
        if not _is_whole(layer):
            continue
        for plane in layer.planes:
            for remote in found[name, plane.content]:
                _check(name, layer, remote, plane)


def _check(name: str, layer: LayerCache, remote: Plane, local: Plane) -> None:
    try:
        check_whole(remote, local)
    except UnplannableCopy as error:
        raise PeerRefused(
            f"blocks of layer {name} hold {layer.kind.contents}, and move whole: {error}",
            "use one --tensor-parallel-size and one VLLM_KV_CACHE_LAYOUT on both sides",
        ) from error


def _is_whole(layer: LayerCache) -> bool:
    return layer.planes[0].is_whole
