"""Split K/V: keys and values of a block in one region, or in two far apart.

In releases <= 0.25 FlashInfer's blocks hold keys and then values, and FlashAttention's from 0.23
on; kvcached keeps the two apart. A handshake does not name either, and states regions and bytes: a
cache whose keys and values are split has twice the regions, of half a block each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvpatch.geometry.plane import Plane

if TYPE_CHECKING:
    from kvpatch.peer.agent_metadata import AgentMetadata
    from kvpatch.worker.local_geometry import KVSplit, LocalGeometry

#: kvcached's pages are a multiple of this; its tensors end with the last whole page.
PAGE_BYTES = 2 << 20


def kv_split_of(ours: LocalGeometry) -> KVSplit | None:
    """How a worker has registered them, whose backend's own blocks hold both."""
    found = {
        sum(plane.address in ours.addresses for plane in layer.planes)
        for layer in ours.layers.values()
    }
    if found == {2}:
        return "apart"
    return "together" if found == {1} else None


def kv_split_of_peer(ours: LocalGeometry, peer: AgentMetadata) -> KVSplit | None:
    """How a peer of our backend keeps keys and values; None where that is not in question.

    And where its regions are neither ours, nor twice or half as many.
    """
    count, theirs = len(ours.addresses), len(peer.addresses)
    if peer.cache_shape is not None:
        return "apart" if peer.cache_shape == "keys first" else "together"
    if ours.kv_split is None or peer.form is not None:
        return None
    if theirs == count:
        return ours.kv_split
    if ours.kv_split == "together":
        return "apart" if theirs == 2 * count else None
    return "together" if 2 * theirs == count else None


def by_peers_regions(
    members: Mapping[int, list[Plane]], ours: LocalGeometry, peer: AgentMetadata
) -> dict[int, list[Plane]]:
    """A layer's planes, by the number of our region, as they lie in the peer's regions."""
    theirs = kv_split_of_peer(ours, peer)
    own = ours.kv_split if peer.cache_shape is None else kv_split_of(ours)
    if theirs is None or theirs == own:
        return dict(members)
    found: dict[int, list[Plane]] = {}
    for region, planes in members.items():
        for number, plane in enumerate(planes):
            place = 2 * region + number if theirs == "apart" else region // 2
            found.setdefault(place, []).append(plane)
    return found


def may_be_kvcacheds(peer: AgentMetadata, parts: Iterable[int]) -> bool:
    """Whether a peer that states keys and values together may keep them apart.

    A worker with kvcached and without a patch for its tensors says what a plain one says.
    kvcached cuts a number of whole pages into blocks, and leaves less than a block over.

    Args:
        parts: into how many kernel blocks a block of its may be cut.
    """
    half_bytes = peer.block_bytes[0] // 2
    rest_bytes = -(peer.blocks * half_bytes) % PAGE_BYTES
    return any(peer.blocks % part == 0 and rest_bytes < part * half_bytes for part in parts)
