"""The content of a layer's blocks on both sides: heads, tokens, and which of them move whole.

Attention groups may have several shapes (Gemma: other heads and head_dim in layers with full
attention than in those with windows). vLLM then plans blocks of more tokens for the smaller
ones, so that all blocks have as many bytes. A handshake states the fewest tokens of all to
0.29, and from 0.30 on their least common multiple.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import NamedTuple

from kvpatch.core.errors import PeerRefused, UnplannableCopy
from kvpatch.geometry.layout_strides import Axes, row_bytes
from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.plane_copies import check_whole
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.worker.cache_kinds import Kind
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.registered_caches import LayerCache

ONE_SIZE = "use one --tensor-parallel-size on both sides"


class BlockShape(NamedTuple):
    """The shape of one layer's blocks on one rank of a peer."""

    first_head: int
    heads: int
    tokens: int


class Piece(NamedTuple):
    """Some heads of a layer of ours, in one dense piece of each block of a peer's region.

    Attributes:
        members: our planes of what is in it.
        offset_bytes: from the region's start to the piece in the first block.
    """

    members: Sequence[Plane]
    region: int
    axes: Axes
    shape: BlockShape
    offset_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Returns the bytes that it takes of a block."""
        return self.shape.tokens * self.shape.heads * row_bytes(self.members)


def heads_of(total_heads: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Returns the first global head of a rank, and how many it has; some may share one."""
    return tp_rank * total_heads // tp_size, max(1, total_heads // tp_size)


def tokens_of(layers: Mapping[str, LayerCache], names: Iterable[str]) -> set[int]:
    """Returns the tokens of a kernel block of some layers."""
    return {plane.counts.block_tokens for name in names for plane in layers[name].planes}


def shape_at_peer(
    ours: LocalGeometry, peer: AgentMetadata, members: Sequence[Plane], size_bytes: int | None
) -> BlockShape:
    """Returns the heads and tokens of a layer in a peer's block of so many bytes.

    Args:
        members: our planes of what is in that block.
        size_bytes: None where blocks of all layers have the tokens that the peer states.
    """
    first, tokens = members[0], peer.block_tokens or ours.block_tokens
    first_head, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    if first.content is Content.LATENT:
        return BlockShape(0, 1, tokens)
    if first.content is Content.SLOT:
        return BlockShape(first_head * first.counts.heads, first.counts.heads, tokens)
    if not ours.layers_differ_in_shape:
        return BlockShape(first_head, heads, tokens)
    if (peer.tp_rank, peer.tp_size) != (ours.tp_rank, ours.tp_size):
        raise PeerRefused(
            "layers of several shapes have heads of which nobody knows which rank has them",
            ONE_SIZE,
        )
    heads = first.counts.heads
    if size_bytes is None:
        return BlockShape(first.first_head, heads, tokens)
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
    """Refuses a peer whose blocks' bytes do not come to the tokens that it states."""
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


def peer_memory(ours: LocalGeometry, peer: AgentMetadata) -> Memory:
    """Returns the memory that a peer's regions lie in, of our kind where it states none."""
    kinds = set(peer.memory_kinds or (ours.memory.kind,))
    for kind in ("DRAM", "VRAM"):
        if kinds == {kind}:
            return Memory(kind, peer.device_id)
    raise PeerRefused(
        f"its regions lie in memory of the kinds {', '.join(sorted(kinds))}",
        "keep its whole KV cache on one device or on the host",
    )


def check_blocks(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Refuses a peer of other kernel blocks or heads where our blocks move whole.

    Kinds that the table lacks are read from peers like us alone (behind a host buffer).
    """
    same_tokens = peer.block_tokens in (None, ours.block_tokens)
    is_like = (
        same_tokens
        and peer.tp_size == ours.tp_size
        and peer.kernel_blocks_per_block in (None, ours.kernel_blocks_per_block)
        and peer.layout in (None, ours.layout)
    )
    is_split = split_by_nobody(ours, peer)
    for name, layer in ours.layers.items():
        if not (layer.kind.is_known or is_like):
            raise unknown_kind(name, layer.kind)
        if is_split and layer.kind.mixes_heads:
            raise PeerRefused(
                f"blocks of layer {name} hold {layer.kind.contents}, and move whole, never a share "
                "of their heads",
                ONE_SIZE,
            )
        if layer.planes[0].is_whole and not same_tokens:
            raise PeerRefused(
                f"blocks of layer {name} hold {layer.kind.contents}, and move whole: both sides "
                f"need kernel blocks of one size, {peer.block_tokens} or {ours.block_tokens} "
                "tokens",
                "use one --block-size and one attention backend",
            )


def unknown_kind(layer: str, kind: Kind) -> PeerRefused:
    """Returns the refusal of a heterogeneous peer for such a kind."""
    return PeerRefused(
        f"blocks of layer {layer} hold {kind.contents}, which is read from engines alike alone",
        "use one --block-size, --tensor-parallel-size and VLLM_KV_CACHE_LAYOUT on both sides",
    )


def split_by_nobody(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if blocks of one side hold those of several ranks of the other, their heads mixed."""
    _, own = heads_of(ours.total_heads, ours.tp_rank, ours.tp_size)
    _, others = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    kinds = [layer.kind for layer in ours.layers.values()]
    return own != others and any(kind.mixes_heads or not kind.is_known for kind in kinds)


def check_planes(ours: LocalGeometry, theirs: Sequence[Plane]) -> None:
    """Refuses a peer whose blocks are not ours byte for byte, where ours move whole."""
    found = defaultdict(list)
    for plane in theirs:
        found[plane.layer, plane.content].append(plane)
    for name, layer in ours.layers.items():
        for plane in layer.planes if layer.planes[0].is_whole else ():
            try:
                for remote in found[name, plane.content]:
                    check_whole(remote, plane)
            except UnplannableCopy as error:
                raise PeerRefused(
                    f"blocks of layer {name} hold {layer.kind.contents}, and move whole: {error}",
                    "use one --tensor-parallel-size and one VLLM_KV_CACHE_LAYOUT on both sides",
                ) from error
