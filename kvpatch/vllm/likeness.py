"""Whether a peer is like us, so that the release reads it rightly, or must be refused."""

from __future__ import annotations

import logging
from typing import Any

from kvpatch.geometry import KeyOrder
from kvpatch.vllm.peers import OurSide, heads_of, refusal
from kvpatch.vllm.pieces import NAMED_LAYOUTS
from kvpatch.vllm.wire import PeerRefused, Statement

_LOG = logging.getLogger("kvpatch.unlike_engines")

#: Backends that take blocks of any size whole.
_WHOLE_BLOCK_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN")


def is_alike(ours: OurSide, peer: Statement) -> bool:
    """Whether the release reads this peer rightly: the same blocks, the same order in them.

    Raises:
        PeerRefused: it cannot be read by anybody here.
    """
    if peer.block_tokens is None:
        # Bytes alone do not tell 16 tokens of bf16 from 32 of fp8.
        same_blocks = peer.block_bytes == alike_block_bytes(ours, peer)
        if not same_blocks:
            raise refusal(
                ours,
                peer,
                "this release's handshake does not state the block size: use one --block-size, "
                "--kv-cache-dtype and model on both sides, or vLLM 0.11.1 or later",
            )
    else:
        same_blocks = peer.block_tokens == ours.block_tokens and (
            peer.kernel_blocks_per_block in (None, ours.kernel_blocks_per_block)
        )
    same_layout = peer.layout in (None, ours.layout)
    # Heads of unlike ranks are one piece of a layer's block in HND only.
    same_heads = peer.tp_size == ours.tp_size or _has_heads_in_pieces(ours)
    if same_blocks and same_layout and same_heads:
        return True
    if ours.key_order is KeyOrder.COLUMN_MAJOR and ours.item_bytes != 4:
        raise refusal(
            ours,
            peer,
            "a CPU with AMX tiles keys of 2 bytes where the block size allows, and the handshake "
            "does not say so: use --dtype float32, or one block size on both sides",
        )
    # Releases that state no block size know no kernel blocks either.
    may_cut = peer.block_tokens is not None and peer.kernel_blocks_per_block is None
    if may_cut and ours.backend not in _WHOLE_BLOCK_BACKENDS:
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


def _has_heads_in_pieces(ours: OurSide) -> bool:
    if ours.layout in NAMED_LAYOUTS:
        return ours.layout in ("LBHNC", "BLHNC")
    return ours.inner_layout == "HND"


def alike_block_bytes(ours: OurSide, peer: Statement) -> tuple[int, ...]:
    """What a block would have on the peer if its blocks were ours: its heads, our tokens."""
    has_heads = any(p.content.value != "latent" for c in ours.layers.values() for p in c.planes)
    if not has_heads:
        return ours.block_bytes
    _, our_heads = heads_of(ours.total_heads, ours.tp_rank, ours.tp_size)
    _, their_heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    return tuple(length * their_heads // our_heads for length in ours.block_bytes)


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


def refuse_smaller_blocks(worker: Any, metadata: Any) -> None:
    """Refuses a peer of smaller blocks where this worker has no reader of its own.

    Every release that takes such a peer pairs wrong tokens where D has a prefix hit.
    Recurrent state has rules of its own, which nobody here has checked.

    Raises:
        PeerRefused: the release would read it.
    """
    theirs = getattr(metadata, "block_size", None)  # from 0.11.1
    if not isinstance(theirs, int) or theirs >= worker.block_size:
        return
    if getattr(worker, "_has_mamba", False):
        _LOG.warning(
            "engine %s has blocks of %d tokens and we have %d: left to vLLM, since this model has "
            "recurrent state",
            metadata.engine_id,
            theirs,
            worker.block_size,
        )
        return
    raise PeerRefused(
        f"engine {metadata.engine_id} cannot be read: it has blocks of {theirs} tokens, we have "
        f"{worker.block_size}, and this engine's cache is not one that kvpatch reads into (a host "
        "buffer, context parallelism, or layers that share caches): use one --block-size on both "
        "sides"
    )
