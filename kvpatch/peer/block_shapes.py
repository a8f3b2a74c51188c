"""The content of blocks on both sides: heads, tokens, keys and values, and what moves whole.

Attention groups may have several shapes (Gemma: other heads and head_dim in layers with full
attention than in those with windows). vLLM then plans blocks of more tokens for the smaller
ones, so that all blocks have as many bytes. A handshake states the fewest tokens of all to
0.29, and from 0.30 on their least common multiple.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import lcm

from kvpatch.core.errors import PeerRefused, UnplannableCopy
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.layout_strides import LAYERS_INSIDE_BLOCKS
from kvpatch.geometry.plane import Memory, Plane
from kvpatch.geometry.plane_copies import check_whole
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.worker.cache_kinds import Kind
from kvpatch.worker.local_geometry import KVSplit, LocalGeometry, overlay_unlike
from kvpatch.worker.registered_caches import LayerCache

ONE_SIZE = "use one --tensor-parallel-size on both sides"


def heads_of(total_heads: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Returns the first global head of a rank, and how many it has; some may share one."""
    return tp_rank * total_heads // tp_size, max(1, total_heads // tp_size)


def tokens_of(layers: Mapping[str, LayerCache], names: Iterable[str]) -> set[int]:
    """Returns the tokens of a kernel block of some layers."""
    return {plane.counts.block_tokens for name in names for plane in layers[name].planes}


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


def has_ranks_unmet(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if it has more ranks than we do, and the release meets one of them."""
    return ours.facts.meets_one_rank and peer.tp_size > ours.tp_size


def has_copies(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if a rank of the peer has as many bytes for a token as one of ours, in each region."""
    tokens = peer.block_tokens or ours.block_tokens
    return len(peer.block_bytes) == len(ours.block_bytes) and all(
        theirs * ours.block_tokens == own * tokens
        for theirs, own in zip(peer.block_bytes, ours.block_bytes, strict=True)
    )


def has_one_head(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if no rank has two heads of a layer, and the release takes such a peer's NHD for HND."""
    ranks = min(ours.tp_size, peer.tp_size)
    has_one = all(heads <= ranks for heads, _ in ours.heads_of_layers)
    return has_one and peer.tp_size >= _least_with_copies(ours)


def _least_with_copies(ours: LocalGeometry) -> int:
    """Returns the fewest ranks of a peer whose heads the release takes for copied."""
    return ours.total_heads if ours.facts.counts_one_head else ours.total_heads + 1


def has_replicated_heads(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if the release refuses a peer of another TP size for the heads that some ranks share."""
    if peer.tp_size == ours.tp_size or not ours.has_heads:
        return False
    least = _least_with_copies(ours)
    if peer.tp_size > ours.tp_size:  # of a model with states it takes one, and reads it rightly
        return peer.tp_size >= least and not ours.states
    if ours.tp_size <= ours.total_heads or ours.facts.reads_its_share:
        return False
    return peer.tp_size < least  # else the release takes both for holders of one head a rank


def has_unlike_shares(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if a block of ours may be other shares of a peer's block, by the layer."""
    is_one_shape = ours.groups is None and not ours.layers_differ_in_shape
    if peer.tp_size == ours.tp_size or ours.has_latents or is_one_shape:
        return False
    overlays_pages = (
        ours.layout in LAYERS_INSIDE_BLOCKS
        and ours.groups is not None
        and overlay_unlike(ours.pages.values())
    )
    return are_unlike_shares(ours.heads_of_layers, peer.tp_size, overlays_pages=overlays_pages)


def are_unlike_shares(
    heads_of_layers: Iterable[tuple[int, int]], ranks: int, *, overlays_pages: bool
) -> bool:
    """True if layers of several shapes may be other shares of a peer's block than one another.

    Where ranks share out the heads of some layers, and copy those of others, vLLM plans blocks of
    unlike tokens on the two sides. And where pages of unlike bytes begin in one place of a block
    (from 0.29), the release takes a layer's share from the largest one's region.

    Args:
        heads_of_layers: KV heads of a layer on all ranks, and those of one of ours.
        ranks: of the peer, not as many as ours.
        overlays_pages: True if pages of unlike bytes begin in one place of a block.
    """
    shares = {Fraction(max(1, total // ranks), own) for total, own in heads_of_layers}
    return len(shares) > 1 or (overlays_pages and bool(shares - {Fraction(1)}))


def refuse_other_rows(facts: ReleaseFacts, own_backend: str, backend: object) -> None:
    """Refuses a peer without a compared hash whose rows the release would take for ours.

    What it reads into a CPU's cache it reorders itself, or ends by it. Keys by column are in no
    other cache, known to the table of releases or not.
    """
    own, theirs = facts.form_of(own_backend), facts.form_of(backend)
    if theirs is None or own == theirs:
        return
    is_reordered = own is not None and own.by_column and not facts.ends_by_reordering
    if not is_reordered and (own is not None or theirs.by_column):
        raise PeerRefused(
            f"its attention backend is {backend}, whose blocks are {theirs}, and ours "
            f"{own_backend}, whose blocks are {own or 'rows, or not known here'}",
            "set KVPATCH_ACCEPT=attn_backend here, and leave enforce_handshake_compat on, which "
            "has its hash compared, or use one attention backend on both sides",
        )


# --- split K/V ------------------------------------------------------------------------
#
# In releases <= 0.25 FlashInfer's blocks hold keys and then values, and FlashAttention's from 0.23
# on; kvcached keeps the two apart. A handshake names neither, and states regions and bytes: a cache
# whose keys and values are split has twice the regions, of half a block each.


#: kvcached's pages are a multiple of this; its tensors end with the last whole page.
PAGE_BYTES = 2 << 20


def kv_split_of(ours: LocalGeometry) -> KVSplit | None:
    """Returns how a worker has registered keys and values that its backend's blocks hold both."""
    found = {
        sum(plane.address in ours.addresses for plane in layer.planes)
        for layer in ours.layers.values()
    }
    if found == {2}:
        return "apart"
    return "together" if found == {1} else None


def kv_split_of_peer(ours: LocalGeometry, peer: AgentMetadata) -> KVSplit | None:
    """Returns how a peer of our backend keeps keys and values; None where that is not in question.

    None too where its regions are neither ours, nor twice or half as many.
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


def may_be_kvcacheds(peer: AgentMetadata, parts: Iterable[int]) -> bool:
    """True if a peer that states keys and values together may keep them apart.

    A worker with kvcached and without a patch for its tensors says what a plain one says.
    kvcached cuts a number of whole pages into blocks, and leaves less than a block over.

    Args:
        parts: into how many kernel blocks a block of its may be cut.
    """
    half_bytes = peer.block_bytes[0] // 2
    rest_bytes = -(peer.blocks * half_bytes) % PAGE_BYTES
    return any(peer.blocks % part == 0 and rest_bytes < part * half_bytes for part in parts)
