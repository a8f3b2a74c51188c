"""Where a peer's layers lie: its planes, from what it states and from how our own layers lie.

Both ends run one model, so the peer holds the same contents, and in the same form, but where its
attention backend or its release is another, which is then said of it. In releases <= 0.28 a region
of the peer holds what our region of the same number holds; only sizes and the order of heads and
tokens differ, and the peer states those. From 0.29 on regions differ too, and follow from the
layout's name.
"""

from __future__ import annotations

from kvpatch.core.errors import PeerRefused, UnreadableGeometry
from kvpatch.geometry.plane import Plane
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import check_tokens
from kvpatch.peer.regions_by_layout import by_layout
from kvpatch.peer.regions_by_number import by_number
from kvpatch.peer.remote_cross_layer_blocks import in_cross_layer_blocks
from kvpatch.peer.whole_blocks import check_blocks, check_planes
from kvpatch.worker.local_geometry import LocalGeometry


def peer_regions(ours: LocalGeometry, peer: AgentMetadata) -> tuple[tuple[Plane, ...], ...]:
    """Every plane of one rank of a peer; those whose blocks lie inside one another together.

    Raises:
        PeerRefused: its regions are not those of our layers, or a block's bytes are
            not what its sizes come to.
    """
    check_blocks(ours, peer)
    try:
        if peer.form is not None:
            found = in_cross_layer_blocks(ours, peer, peer.form)
        elif ours.units is not None and peer.cache_shape in (None, "packed"):
            found = by_layout(ours, ours.units, peer)
        else:
            found = by_number(ours, peer)
    except UnreadableGeometry as error:  # sizes that overlap, or end beyond all addresses
        raise PeerRefused(
            f"its numbers cannot be true: {error}",
            "use one vLLM, one kvpatch and one model on both sides",
        ) from error
    planes = [plane for region in found for plane in region]
    check_tokens(ours, peer, planes)
    check_planes(ours, planes)
    return found
