"""Whether a peer is like us, so that the release reads it rightly, or must be refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpatch.geometry import NAMED_LAYOUTS, KeyOrder, inner_layout
from kvpatch.vllm.groups import Group
from kvpatch.vllm.halves import halves_of_peer, may_be_kvcacheds
from kvpatch.vllm.head_shares import shares_heads
from kvpatch.vllm.local_geometry import LocalGeometry
from kvpatch.vllm.remote_geometry import refusal
from kvpatch.vllm.shapes import heads_of
from kvpatch.vllm.whole_blocks import split_by_nobody
from kvpatch.vllm.wire import PeerRefused, Statement


def is_alike(ours: LocalGeometry, peer: Statement) -> bool:
    """Whether the release reads this peer rightly: the same blocks, the same order in them.

    Raises:
        PeerRefused: it cannot be read by anybody here.
    """
    if ours.planned_layout is not None and peer.layout == ours.planned_layout:
        raise refusal(
            ours,
            peer,
            "our allocator has given our tensors another layout than the backend's, and of a peer "
            "that states the backend's nobody knows whether its has too: use one allocator on both "
            "sides, and set ENABLE_KVPATCH on P",
        )
    same_blocks = peer.block_tokens == ours.block_tokens and (
        peer.kernel_blocks_per_block in (None, ours.kernel_blocks_per_block)
    )
    same_layout = peer.layout in (None, ours.layout) or _has_same_bytes(ours, peer)
    # Heads of unlike ranks are one piece of a layer's block in HND only; MLA has none.
    same_heads = peer.tp_size == ours.tp_size or (
        (_has_heads_in_pieces(ours) or not ours.has_heads)
        and not has_ranks_unmet(ours, peer)
        and not shares_heads(ours, peer)
        and not split_by_nobody(ours, peer)
    )
    same_halves = halves_of_peer(ours, peer) in (None, ours.halves)
    if same_blocks and same_layout and same_heads and same_halves and not ours.misses_pages:
        return True
    if not same_halves:
        _refuse_unproven_halves(ours, peer)
    if ours.key_order is KeyOrder.COLUMN_MAJOR and ours.item_bytes != 4:
        raise refusal(
            ours,
            peer,
            "a CPU with AMX tiles keys of 2 bytes where the block size allows, and the handshake "
            "does not say so: use --dtype float32, or one block size on both sides",
        )
    if peer.kernel_blocks_per_block is None and ours.kernel_sizes is None:
        raise refusal(
            ours,
            peer,
            f"{ours.backend} may cut blocks into kernel blocks, and this release's handshake does "
            "not say so: use one --block-size on both sides, or vLLM 0.21 or later",
        )
    if peer.backend not in (None, ours.backend):
        raise refusal(
            ours,
            peer,
            f"its attention backend is {peer.backend}, ours {ours.backend}: use one on both sides "
            "(VLLM_ATTENTION_BACKEND)",
        )
    return False


def _has_same_bytes(ours: LocalGeometry, peer: Statement) -> bool:
    """Whether two names of layouts are the same bytes: without heads, heads and tokens have none.

    Releases look at neither's name there.
    """
    return not ours.has_heads and {peer.layout, ours.layout} == {"LBHNC", "LBNHC"}


def _refuse_unproven_halves(ours: LocalGeometry, peer: Statement) -> None:
    """Refuses a peer whose keys and values are together by its statement, and may not be.

    Raises:
        PeerRefused: with what would tell.
    """
    if ours.halves == "together":
        return
    if peer.layout is None:
        raise refusal(
            ours,
            peer,
            "this release's handshake states no layout, which tells heads from tokens where P's "
            "blocks hold keys and values together and ours keep them apart: use kvcached on both "
            "sides or on neither, or vLLM 0.10.1 or later",
        )
    parts: tuple[int, ...] = (peer.kernel_blocks_per_block or 1,)
    if peer.kernel_blocks_per_block is None and ours.kernel_sizes is not None:
        parts = ours.kernel_sizes.parts(peer.block_tokens or ours.block_tokens)
    if may_be_kvcacheds(peer, parts):
        raise refusal(
            ours,
            peer,
            "its blocks hold keys and values together, or it has kvcached, which would keep them "
            "apart, and no kvpatch to say so: as many blocks come out of kvcached's pages. Set "
            "ENABLE_KVPATCH on a P with kvcached, and have one without it use another number of "
            "blocks (--num-gpu-blocks-override)",
        )


def has_ranks_unmet(ours: LocalGeometry, peer: Statement) -> bool:
    """Whether it has more ranks than we do, and the release meets one of them."""
    return ours.meets_one_rank and peer.tp_size > ours.tp_size


def has_two_layouts(ours: LocalGeometry, peer: Statement) -> bool:
    """Whether heads and tokens of a peer's blocks may lie in either order for all it says."""
    return (
        peer.layout is None  # 0.10.0
        and ours.key_order is KeyOrder.ROW_MAJOR
        and (peer.block_tokens or 2) > 1
        and _has_many_heads(ours, peer)
    )


def _has_many_heads(ours: LocalGeometry, peer: Statement) -> bool:
    _, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    return heads > 1 and ours.has_heads


def _has_heads_in_pieces(ours: LocalGeometry) -> bool:
    if ours.layout in NAMED_LAYOUTS:
        return inner_layout(ours.layout) == "HND"
    return ours.inner_layout == "HND"


def alike_block_bytes(ours: LocalGeometry, peer: Statement) -> tuple[int, ...]:
    """What a block would have on the peer if its blocks were ours: its heads, our tokens."""
    if not ours.has_heads or has_ranks_unmet(ours, peer):  # shown as a rank like ours
        return ours.block_bytes
    if shares_heads(ours, peer):  # shown as if each rank had heads of its own
        return tuple(length * ours.tp_size // peer.tp_size for length in ours.block_bytes)
    _, our_heads = heads_of(ours.total_heads, ours.tp_rank, ours.tp_size)
    _, their_heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    return tuple(length * their_heads // our_heads for length in ours.block_bytes)


#: Ways to speculate that reserve no slots.
_WITHOUT_SLOTS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


def reserves_slots(vllm_config: Any) -> bool:
    """Whether an engine reserves slots for drafted tokens behind a prompt."""
    speculation = getattr(vllm_config, "speculative_config", None)
    return speculation is not None and speculation.method not in _WITHOUT_SLOTS


def refuse_drafted_windows(
    worker: Any, ours: LocalGeometry, groups: Sequence[Group], peer: Statement
) -> None:
    """Refuses a peer whose lists of blocks end nobody knows where.

    A window's list is the end of a table. Slots for drafted tokens can add a block to it,
    which only a list of full attention would tell. A draft model has caches of its own, so
    that both sides have one or neither has.

    Raises:
        PeerRefused: there are windows alone, and this worker drafts tokens.
    """
    windows_alone = all(group.window_tokens for group in groups)
    if reserves_slots(worker.vllm_config) and (windows_alone or ours.unlike_shapes):
        raise refusal(
            ours,
            peer,
            "this vLLM names blocks for drafted tokens too, and with sliding windows alone, or "
            "groups of several shapes, nobody can tell them from the prompt's: speculate without a "
            "draft model, use one --block-size, or vLLM 0.25 or later",
        )


def refuse_unreadable(worker: Any, peer: Statement) -> None:
    """Refuses an unlike peer where nobody knows how our own keys lie in a block.

    Raises:
        PeerRefused: the release would copy such blocks as if they were rows.
    """
    alike = peer.block_tokens in (None, worker.block_size) and peer.layout in (
        None,
        worker.kv_cache_layout,
    )
    if not alike:
        raise PeerRefused(
            f"engine {peer.engine_id} cannot be read: it has {peer}; we have blocks of "
            f"{worker.block_size} tokens, layout {worker.kv_cache_layout}, in which the backend "
            f"{worker.backend_name} packs keys by rules of its own: use one block size and layout "
            "on both sides"
        )


#: Of a peer's memory the release prepares a descriptor for each block of each region. So many
#: at least may always be, and so many times as many as this worker has of its own.
_DESCRIPTORS = 1 << 24
_TIMES_OWN = 16


def refuse_endless(worker: Any, metadata: Any) -> None:
    """Refuses a peer of which the release would prepare more than this process can hold.

    Raises:
        PeerRefused: it states more blocks than any cache of this model has.
    """
    regions = len(metadata.kv_caches_base_addr)
    counts = getattr(metadata, "region_num_blocks", None)  # from 0.30
    found = sum(counts) if counts else metadata.num_blocks * regions
    most = max(_DESCRIPTORS, _TIMES_OWN * getattr(worker, "num_blocks", 0) * regions)
    if found > most:
        raise PeerRefused(
            f"engine {metadata.engine_id!r:.200} cannot be read: it states {found} blocks in "
            f"{regions} regions, and {most} are the most that are prepared for, {_TIMES_OWN} times "
            "our own: give this engine more KV cache, or the prefill side larger blocks"
        )
