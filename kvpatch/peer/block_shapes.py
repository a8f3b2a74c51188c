"""What a layer's blocks hold, on both sides: heads, and tokens.

Attention groups may have several shapes (Gemma: other heads and head_dim in layers with full
attention than in those with windows). vLLM then plans blocks of more tokens for the smaller
ones, so that all blocks have as many bytes. A handshake states the fewest tokens of all to
0.29, and from 0.30 on their least common multiple.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.layout_strides import row_bytes
from kvpatch.geometry.plane import Content, Plane
from kvpatch.worker.registered_caches import LayerCache

if TYPE_CHECKING:
    from kvpatch.peer.agent_metadata import AgentMetadata
    from kvpatch.worker.local_geometry import LocalGeometry


class BlockShape(NamedTuple):
    """One layer's blocks on one rank of a peer."""

    first_head: int
    heads: int
    tokens: int


def heads_of(total_heads: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """(first global head, number of heads) of a rank; ranks beyond the heads share them."""
    return tp_rank * total_heads // tp_size, max(1, total_heads // tp_size)


def tokens_of(layers: Mapping[str, LayerCache], names: Iterable[str]) -> set[int]:
    """Tokens of a kernel block of some layers."""
    return {plane.counts.block_tokens for name in names for plane in layers[name].planes}


def shape_at_peer(
    ours: LocalGeometry, peer: AgentMetadata, members: Sequence[Plane], size_bytes: int
) -> BlockShape:
    """What a peer's block of so many bytes holds of a layer.

    Args:
        members: our planes of what is in that block.

    Raises:
        PeerRefused: its heads are not ours, of layers that have several shapes, or its
            bytes are no whole number of tokens.
    """
    first, tokens = members[0], peer.block_tokens or ours.block_tokens
    if first.content is Content.LATENT:
        return BlockShape(0, 1, tokens)
    if first.content is Content.SLOT:
        slots = first.counts.heads
        return BlockShape(
            heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)[0] * slots, slots, tokens
        )
    if not ours.layers_differ_in_shape:
        return BlockShape(*heads_of(ours.total_heads, peer.tp_rank, peer.tp_size), tokens)
    if (peer.tp_rank, peer.tp_size) != (ours.tp_rank, ours.tp_size):
        raise PeerRefused(
            "layers of several shapes have heads of which nobody knows which rank has them",
            "use one --tensor-parallel-size on both sides",
        )
    heads = first.counts.heads
    token_bytes = heads * row_bytes(members)
    tokens, rest = divmod(size_bytes, token_bytes)
    if rest or not tokens:
        raise PeerRefused(
            f"{size_bytes} bytes are no whole number of tokens of layer {first.layer}, which "
            f"take {token_bytes}",
            "use one model, --dtype and --kv-cache-dtype",
        )
    return BlockShape(first.first_head, heads, tokens)


def check_tokens(ours: LocalGeometry, peer: AgentMetadata, planes: Sequence[Plane]) -> None:
    """Whether tokens that were told from bytes are what the peer states.

    Raises:
        PeerRefused: its items have another size, or its blocks are cut.
    """
    if not ours.layers_differ_in_shape:
        return
    if (peer.kernel_blocks_per_block or 1) != 1 or ours.kernel_blocks_per_block != 1:
        raise PeerRefused(
            "blocks of layers of several shapes are cut into kernel blocks",
            "use an attention backend that takes --block-size whole (FlashAttention)",
        )
    found = {plane.layer: plane.counts.block_tokens for plane in planes}
    own = tokens_of(ours.layers, ours.layers)
    states_least = peer.form is not None or ours.block_tokens == min(own)
    expected = min(found.values()) if states_least else lcm(*found.values())
    if peer.block_tokens != expected:
        raise PeerRefused(
            f"blocks of {peer.block_tokens} tokens are stated, and by their bytes layers have "
            f"{sorted(set(found.values()))}",
            "use one model, --dtype and --kv-cache-dtype",
        )
    for group in ours.groups or (ours.layers.keys(),):
        tokens = {found[name] for name in group if name in found}
        if len(tokens) > 1:
            raise PeerRefused(
                f"by their bytes blocks of one group have {sorted(tokens)} tokens",
                "use one model on both sides",
            )
