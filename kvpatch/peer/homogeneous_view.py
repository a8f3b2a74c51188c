"""The metadata that the release is shown of a heterogeneous peer: this worker's own geometry.

The release then prepares and books what it does for a homogeneous peer, within the memory that
the peer registered. Which bytes a read moves is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

from kvpatch.core.errors import PeerRefused
from kvpatch.core.proxies import lookalike
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.layout_strides import layer_by_layer
from kvpatch.peer.agent_metadata import AgentMetadata, restated
from kvpatch.peer.block_shapes import has_ranks_unmet, has_replicated_heads, heads_of
from kvpatch.worker.local_geometry import LocalGeometry

#: The release prepares a descriptor for each block of each region of a peer. So many are always
#: allowed, and so many times as many as this worker has of its own.
_DESCRIPTORS = 1 << 24
_TIMES_OWN = 16


def homogeneous_metadata(
    metadata: Any,
    peer: AgentMetadata,
    ours: LocalGeometry,
    block_bytes: tuple[int, ...],
    own_regions: Mapping[str, Any],
    *,
    most_blocks: int,
) -> Any:
    """Returns a copy of a peer's metadata that describes the same memory in our geometry.

    Where the peer has other regions than we do, all of ours are shown in the same memory.

    Args:
        block_bytes: of each of our regions, as the peer's would be.
        own_regions: what this worker states of its own regions.
        most_blocks: in any region, where there is room for as many.
    """
    count = len(block_bytes)
    if count == len(peer.addresses):
        addresses, spans = list(peer.addresses), _spans(peer)
    else:
        start, length = _widest_span(peer, max(block_bytes))
        addresses, spans = [start] * count, [(start, length)] * count
    room = min(length // block for (_, length), block in zip(spans, block_bytes, strict=True))
    if room < 1:
        raise PeerRefused(
            f"engine {peer.engine_id} holds less than one of our blocks ({max(block_bytes)} "
            f"bytes) in a region: {peer}",
            "give it more KV cache",
        )
    blocks = min(room, most_blocks)
    stated: dict[str, Any] = {
        "num_blocks": blocks,
        "block_len": block_bytes[0],
        "block_lens": list(block_bytes),
        "block_strides": list(block_bytes),
        "block_size": ours.block_tokens,
        "kv_cache_layout": homogeneous_layout(ours),
        "physical_blocks_per_logical_kv_block": ours.kernel_blocks_per_block,
        "region_num_blocks": [blocks] * count,
        "kv_caches_base_addr": addresses,
        "attn_backend_name": ours.backend,
        **own_regions,
    }
    if peer.memory_kinds:
        stated["region_mem_types"] = [*peer.memory_kinds] * count
    return restated(metadata, ours.facts, stated)


def homogeneous_layout(ours: LocalGeometry) -> str:
    """The layout that both sides are said to have: the release splits heads over ranks in HND."""
    return layer_by_layer("HND", like=ours.layout)


def block_bytes_as_ours(ours: LocalGeometry, peer: AgentMetadata) -> tuple[int, ...]:
    """Bytes of each of our regions' blocks, as the peer's would be: its heads, our tokens."""
    if not ours.has_heads or has_ranks_unmet(ours, peer):  # shown as a rank like ours
        return ours.block_bytes
    if has_replicated_heads(ours, peer):  # shown as if each rank had heads of its own
        return tuple(length * ours.tp_size // peer.tp_size for length in ours.block_bytes)
    _, our_heads = heads_of(ours.total_heads, ours.tp_rank, ours.tp_size)
    _, their_heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    return tuple(length * their_heads // our_heads for length in ours.block_bytes)


def _spans(peer: AgentMetadata) -> list[tuple[int, int]]:
    """Returns the start and the bytes of each region, without what other layers have behind it."""
    return [
        (start, (peer.blocks - 1) * stride + length)
        for start, stride, length in zip(
            peer.addresses, peer.stride_bytes, peer.block_bytes, strict=True
        )
    ]


def _widest_span(peer: AgentMetadata, enough_bytes: int) -> tuple[int, int]:
    """Returns the start and the bytes of the most memory in one piece that the peer registered.

    Regions that overlap are one allocation; those that touch may be two, so they are
    taken together only where less is not enough.
    """
    widest = (0, 0)
    for least_overlap in (1, 0):
        start = end = 0
        for address, length in sorted(_spans(peer)):
            if address + least_overlap > end:
                start, end = address, address + length
            end = max(end, address + length)
            if end - start > widest[1]:
                widest = (start, end - start)
        if widest[1] >= enough_bytes:
            break
    return widest


def check_descriptors(worker: Any, facts: ReleaseFacts, metadata: Any) -> None:
    """Refuses a peer that states more blocks than the release can prepare for."""
    regions = len(metadata.kv_caches_base_addr)
    has_counts = "region_num_blocks" in facts.agent_metadata and metadata.region_num_blocks
    found = sum(metadata.region_num_blocks) if has_counts else metadata.num_blocks * regions
    if found <= _DESCRIPTORS:
        return
    most = max(_DESCRIPTORS, _TIMES_OWN * worker.num_blocks * regions)
    if found > most:
        raise PeerRefused(
            f"engine {metadata.engine_id!r:.200} cannot be read: it states {found} blocks in "
            f"{regions} regions, and {most} are the most that are prepared for, {_TIMES_OWN} times "
            "our own",
            "give this engine more KV cache, or the prefill side larger blocks",
        )


def book_own_cut(worker: Any, ours: LocalGeometry, engine_id: str) -> None:
    """Makes 0.20 cut the blocks of a hybrid model's peer as this worker's are cut.

    By itself, 0.20 takes a page to be no larger than its states need. It then ends by an assertion,
    even between like engines.
    """
    if ours.facts.books_cuts_of_peers:
        worker._physical_blocks_per_logical[engine_id] = ours.kernel_blocks_per_block


# --- more ranks than KV heads, where P and D have different numbers of ranks -----------------
#
# Some ranks then hold a head that their neighbours hold too. Releases refuse most such pairs by an
# assertion. Reads of kvpatch are planned by heads. So the release is told that each rank has heads
# of its own, and prepares and books such a peer.


def taken_for_like(worker: Any, ours: LocalGeometry, peer: AgentMetadata) -> tuple[Any, int]:
    """Returns a worker that takes a peer for one like us, and the number of ranks to tell it.

    It compares one layout, and its model has heads of which every rank has some of its own. All
    else is this worker's. The engine goes on with its steps while a handshake is under way, and
    some releases decide by the layout in a step how blocks are put in order.
    """
    facts = ours.facts
    values: dict[str, Any] = {}
    if facts.states_layout:
        values["kv_cache_layout"] = homogeneous_layout(ours)
    if facts.topology and has_replicated_heads(ours, peer):
        heads = 2 * lcm(ours.tp_size, peer.tp_size)
        counts = {"total_num_kv_heads": heads}
        if facts.topology == "transfer_topo":
            counts["local_physical_heads"] = heads // worker.world_size
        values[facts.topology] = lookalike(getattr(worker, facts.topology), **counts)
    ranks = ours.tp_size if has_ranks_unmet(ours, peer) else peer.tp_size
    return lookalike(worker, **values), ranks
