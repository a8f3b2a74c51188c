"""Whether the release reads a peer rightly: one with the same blocks, in the same order inside.

A peer that it does not, and of which nobody can tell what its blocks hold, is refused here.
"""

from __future__ import annotations

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.layout_strides import NAMED_LAYOUTS, inner_layout
from kvpatch.peer.accepted_peers import refuse_other_rows
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import split_by_nobody
from kvpatch.peer.cpu_keys import check_key_order
from kvpatch.peer.homogeneous_view import has_ranks_unmet, has_replicated_heads
from kvpatch.peer.remote_geometry import kv_split_of_peer, may_be_kvcacheds
from kvpatch.worker.local_geometry import LocalGeometry


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
    if peer.key_order not in (None, ours.key_order):  # a CPU whose processor packs keys otherwise
        _refuse_undecidable(ours, peer)
        return False
    same_split = kv_split_of_peer(ours, peer) in (None, ours.kv_split)
    if _has_same_blocks(ours, peer) and same_split and not ours.misses_pages:
        return True
    if not same_split:
        _refuse_unknown_split(ours, peer)
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
    """True if two layouts are the same bytes: without heads LBHNC and LBNHC are."""
    return not ours.has_heads and {peer.layout, ours.layout} == {"LBHNC", "LBNHC"}


def _has_heads_in_pieces(ours: LocalGeometry) -> bool:
    if ours.layout in NAMED_LAYOUTS:
        return inner_layout(ours.layout) == "HND"
    return ours.inner_layout == "HND"


# --- what nobody can tell of a peer of another geometry ------------------------------------


def _refuse_undecidable(ours: LocalGeometry, peer: AgentMetadata) -> None:
    check_key_order(ours, peer)
    if peer.kernel_blocks_per_block is None and ours.kernel_sizes is None:
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


def _refuse_unknown_split(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Refuses a peer whose keys and values are together by its statement, and may not be."""
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
            "apart, and no kvpatch to say so: as many blocks come out of kvcached's pages",
            "set ENABLE_KVPATCH on a P with kvcached, and have one without it use another number "
            "of blocks (--num-gpu-blocks-override)",
        )
