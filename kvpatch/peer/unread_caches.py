"""A cache that we do not read into: whether the release, which alone does, reads a peer rightly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpatch.core.errors import PeerRefused, UnplannableCopy
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import LAYERS_INSIDE_BLOCKS, inner_layout
from kvpatch.geometry.state_shares import Rank
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import (
    ONE_SIZE,
    are_unlike_shares,
    refuse_other_rows,
    unknown_kind,
)
from kvpatch.peer.remote_ranks import check_state_sizes, undivided
from kvpatch.worker.cache_kinds import RING, Holds, Kind
from kvpatch.worker.kv_cache_groups import transferred_groups
from kvpatch.worker.local_geometry import (
    missed_page,
    named_heads_of,
    overlay_unlike,
    readers_of_regions,
    totals_of,
)
from kvpatch.worker.recurrent_state import StateDivision
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.shared_rows import Holder, SharedRows, regions_of


class PlannedHeads(NamedTuple):
    """The KV heads of a cache's layers of rows, as the plan has them.

    Attributes:
        of_layers: what each layer may have on all ranks, and what it has on one of ours.
        is_one_shape: True if all layers have one block table and one shape.
        overlays_pages: True if pages of unlike bytes begin in one place of a block.
    """

    of_layers: frozenset[tuple[int, int]] = frozenset()
    is_one_shape: bool = True
    overlays_pages: bool = False

    def most_on(self, ranks: int, model: int) -> int:
        """Returns the most heads of a layer that one of so many ranks has.

        Args:
            model: the KV heads of the whole model.
        """
        return max(total // ranks for total in (model, *(total for total, _ in self.of_layers)))


@dataclass(frozen=True)
class UnreadCache:
    """A cache that we do not read into: the release alone does.

    Attributes:
        needs_reader: whether its host buffer needs us to.
        knows_keys: whether anybody knows how keys lie in a block.
        has_heads: whether ranks hold heads; the latents of MLA are whole on each.
        misreads_smaller: why the release reads no request of smaller blocks rightly; empty: it
            does some.
        rows: in which layers of unlike kinds overlay one another; None where they do not.
        divisions: how ranks share out the states of each layer that has some, but for those that
            the release itself takes for whole on every rank.
        state_bytes: of each state of a layer, as a handshake states them; empty where it does not.
        mirror_layout: of vLLM's own host buffer, whatever it states; None where that is true.
        shares_tokens: whether ranks share out a block's tokens and no handshake says so.
        mixes_tokens: True if a token's heads are neighbours in a block (NHD), whatever is stated.
        most_heads: the most KV heads that a layer has on this rank; of latents 0.
        total_heads: KV heads of the whole model.
        heads: those of its layers, which may be others.
        row_parts: into how many parts the release cuts a block that is a row of all layers, none
            of which is a block of fewer tokens; None of other caches.
        shared_parts: the same where ranks share out a block's tokens and a handshake says so.
        stages: the stages of this engine's pipeline, each of which has some of the layers.
        missed_layer: a layer whose page the release reads from no P; empty where it reads all.
    """

    block_tokens: int
    tp_size: int
    layout: str | None
    backend: str
    needs_reader: bool = False
    knows_keys: bool = True
    has_heads: bool = True
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    misreads_smaller: str = ""
    rows: SharedRows | None = None
    divisions: Mapping[str, StateDivision] = field(default_factory=dict)
    state_bytes: tuple[int, ...] = ()
    mirror_layout: str | None = None
    shares_tokens: bool = False
    mixes_tokens: bool = False
    most_heads: int = 0
    total_heads: int = 0
    heads: PlannedHeads = PlannedHeads()
    row_parts: int | None = None
    shared_parts: int | None = None
    stages: int = 1
    missed_layer: str = ""

    def sizes_on(self, ranks: int) -> set[tuple[int, ...]]:
        """Returns what our states would take on a rank of so many; nothing where nobody knows."""
        if ranks == self.tp_size:
            return {self.state_bytes} if self.state_bytes else set()
        try:
            return {division.sizes_bytes(Rank(0, ranks)) for division in self.divisions.values()}
        except UnplannableCopy:  # no equal shares: the release may refuse them
            return set()


def check_unread(local: UnreadCache, remote: AgentMetadata, facts: ReleaseFacts) -> None:
    """Refuses a peer that the release would read wrongly."""
    if local.needs_reader:
        raise PeerRefused(
            "this engine's cache is not one that kvpatch reads into (keys in tiles, context "
            "parallelism), and its host buffer needs that",
            "use KVPATCH_HOST_BUFFER=never",
        )
    refuse_other_rows(facts, local.backend, remote.backend)
    if local.missed_layer:
        raise PeerRefused(
            f"layer {local.missed_layer} begins where one of another cache group does, and this "
            "vLLM reads its blocks in part, or not at all (from 0.30 on)",
            "use VLLM_KV_CACHE_LAYOUT=LBHNC on both sides",
        )
    tokens = remote.block_tokens or local.block_tokens
    same_tokens, same_ranks = tokens == local.block_tokens, remote.tp_size == local.tp_size
    same_layout = remote.layout in (None, local.layout)
    if not local.knows_keys and not (same_tokens and same_layout):
        raise PeerRefused(
            f"it has {remote}; we have blocks of {local.block_tokens} tokens, layout "
            f"{local.layout}, in which the backend {local.backend} packs keys by rules of its own",
            "use one block size and layout on both sides",
        )
    _check_heads(local, remote, same_tokens=same_tokens, same_layout=same_layout)
    if not (same_tokens and same_layout and same_ranks):
        # Of what joins, releases <= 0.28 register no engine, and <= 0.31 join it wrongly.
        joins = facts.pairs_heads_by_layout and tokens < local.block_tokens
        _check_contents(local, same_tokens=same_tokens, same_ranks=same_ranks, joins=joins)
    if local.row_parts is not None and remote.kernel_blocks_per_block != local.row_parts:
        raise PeerRefused(
            f"this vLLM cuts its blocks into {remote.kernel_blocks_per_block} parts and ours into "
            f"{local.row_parts}, and each block is a row of all layers, which moves whole",
            "use one block size",
        )
    theirs, ours = remote.kernel_blocks_per_block, local.shared_parts
    if ours is not None and same_tokens and theirs != ours:
        raise PeerRefused(
            f"this vLLM cuts its blocks into {theirs} parts and ours into {ours}, and ends where "
            "ranks share out a block's tokens",
            "use one --block-size on both sides",
        )
    if not same_ranks:
        _check_divisions(local)
    check_state_sizes(remote, local.sizes_on(remote.tp_size))
    if local.rows is not None:
        _check_rows(local, remote, local.rows)
    elif local.has_heads and remote.tp_size < local.tp_size and RING in local.kinds.values():
        # D reads the share of a ring that is a rank's of another layer's region (<= 0.33 at least).
        raise _shared_ring(next(n for n, kind in local.kinds.items() if kind == RING), "fewer")
    if local.knows_keys and tokens < local.block_tokens and local.misreads_smaller:
        raise PeerRefused(
            f"its blocks have {tokens} tokens, ours {local.block_tokens}, this engine's "
            "cache is not one that kvpatch reads into (a host buffer, context parallelism, layers "
            "that share caches, or recurrent state in layout BLHNC), and this vLLM "
            f"{local.misreads_smaller}",
            "use one --block-size on both sides",
        )


def _check_heads(
    local: UnreadCache, remote: AgentMetadata, *, same_tokens: bool, same_layout: bool
) -> None:
    """Refuses a peer whose ranks' share of a block is no piece that the release would take."""
    same_ranks = remote.tp_size == local.tp_size
    if local.shares_tokens and not same_ranks:
        raise PeerRefused(
            f"it has {remote.tp_size} ranks, ours {local.tp_size}, which share out the tokens of a "
            "block, and this vLLM takes heads alone for shared out",
            ONE_SIZE,
        )
    if (
        not (local.has_heads or _have_one_order(local.layout, remote.layout))
        and local.most_heads > 1
    ):
        raise PeerRefused(
            f"it has layout {remote.layout}, ours is {local.layout}, and this vLLM compares no "
            "layouts beside MLA: a draft model's heads have another order",
            "use one VLLM_KV_CACHE_LAYOUT on both sides",
        )
    ranks = local.tp_size, remote.tp_size
    heads = max(local.heads.most_on(size, local.total_heads) for size in ranks)
    if local.mirror_layout is not None and local.has_heads:
        # Of NHD no rank's share of several heads is one piece, and <= 0.19 nothing says so.
        is_told, is_one_piece = local.layout == local.mirror_layout, same_ranks or heads <= 1
        is_read = is_one_piece and (is_told or same_tokens) or (is_told and local.layout == "HND")
        if remote.stated_layout not in (None, local.mirror_layout) or not is_read:
            raise PeerRefused(
                f"vLLM's own host buffer has layout {local.mirror_layout} here and states "
                f"{local.layout} (<= 0.25): it moves whole blocks between two of its kind",
                "use one --block-size and --tensor-parallel-size on both sides, or "
                "KVPATCH_HOST_BUFFER=always on both",
            )
    if local.mixes_tokens and same_layout and not same_ranks and heads > 1:
        raise PeerRefused(
            f"it has {remote.tp_size} ranks, ours {local.tp_size}, and blocks have layout NHD, "
            "of which a rank's heads are not one piece",
            f"set VLLM_KV_CACHE_LAYOUT=HND with FlashAttention, or {ONE_SIZE}",
        )
    if not same_ranks and local.has_heads and _has_unlike_shares(local, remote):
        raise PeerRefused(
            f"it has {remote.tp_size} ranks, ours {local.tp_size}, and layers have several shapes "
            "or numbers of KV heads, of which this vLLM takes one share",
            ONE_SIZE,
        )


def _check_contents(
    local: UnreadCache, *, same_tokens: bool, same_ranks: bool, joins: bool
) -> None:
    """Refuses unlike blocks of which a layer's contents move whole alone.

    Args:
        joins: True if the release joins smaller blocks to a larger one, of kinds that can be.
    """
    for layer, kind in local.kinds.items():
        if not kind.is_known:
            raise unknown_kind(layer, kind)
        contents = f"blocks of layer {layer} hold {kind.contents}"
        is_whole = kind.holds is Holds.WHOLE
        if is_whole and not (same_tokens or (kind.joins and joins)):
            raise PeerRefused(f"{contents}, and move whole", "use one block size")
        # What has no heads is whole on every rank, and the release reads it so, but some rings.
        if is_whole and kind.mixes_heads and local.has_heads and not same_ranks:
            raise PeerRefused(f"{contents}, and move whole, never a share of their heads", ONE_SIZE)


def _check_divisions(local: UnreadCache) -> None:
    """Refuses other ranks where these do not share out a layer's states, or have a part whole."""
    for layer, division in local.divisions.items():
        if division.reason:
            raise undivided(layer, division)
        if division.has_copies:
            raise PeerRefused(
                f"recurrent state of layer {layer} has a part that every rank has whole, and "
                "this vLLM takes it for shared out",
                ONE_SIZE,
            )


def _has_unlike_shares(local: UnreadCache, remote: AgentMetadata) -> bool:
    if local.heads.is_one_shape or local.rows is not None:  # rows of rings are judged by page
        return False
    overlays = local.heads.overlays_pages
    return are_unlike_shares(local.heads.of_layers, remote.tp_size, overlays_pages=overlays)


def _have_one_order(*layouts: str | None) -> bool:
    """True if heads and tokens come in one order in a layer's block, by what is stated."""
    orders = {inner_layout(one) or one for one in layouts if one}
    return len(orders) <= 1


def _check_rows(local: UnreadCache, remote: AgentMetadata, rows: SharedRows) -> None:
    """Refuses a peer of which the release copies a page in part, or over other pages."""
    short = rows.copied_short()
    if short is not None:
        page, copied = short
        size = page.region.size_bytes
        if page.holder is Holder.WHOLE_STATE:
            raise PeerRefused(
                f"the state of layer {page.layer} has {size} bytes in a block, and this vLLM "
                f"copies {copied} of them, by the size of another layer that begins there",
                "use vLLM 0.32 or later on both sides",
            )
        raise PeerRefused(
            f"layer {page.layer} has {size} bytes in a block, and this vLLM copies {copied} of "
            "them, by the size of another layer that begins there",
            "use a larger --block-size on both sides",
        )
    ranks = remote.tp_size, local.tp_size
    regions = regions_of(remote.addresses, remote.block_bytes)
    if remote.tp_size == local.tp_size or not local.has_heads:
        if rows.has_other_rows(regions) and not rows.is_cut_by_page():
            raise PeerRefused(
                "layers of several groups overlay one another in a block, P's at other places, and "
                "this vLLM copies one over another",
                "use one model, vLLM, --dtype, --mamba-cache-dtype, --mamba-ssm-cache-dtype and "
                "--speculative-config on both sides",
            )
        return
    if rows.has_equal_rows(regions, ranks):
        return
    if not rows.is_cut_by_page():
        raise PeerRefused(
            "layers of several groups overlay one another in a block, P's at other places, and "
            "this vLLM copies a rank's share of one over another",
            f"{ONE_SIZE}, or one of at least {rows.heads} (the KV heads) on both, and one "
            "--block-size",
        )
    ring = rows.misread_ring(ranks)
    if ring is not None:
        raise _shared_ring(ring.layer, "fewer" if remote.tp_size < local.tp_size else "more")


def _shared_ring(layer: str, ranks: str) -> PeerRefused:
    return PeerRefused(
        f"blocks of layer {layer} hold {RING.contents}, of which this vLLM reads a share where P "
        f"has {ranks} ranks",
        ONE_SIZE,
    )


# --- heads, by the plan --------------------------------------------------------------------


def planned_heads(release: ReleaseWorker, kinds: Mapping[str, Kind]) -> PlannedHeads:
    """Returns the KV heads of layers of rows, whose tensors need not tell.

    <= 0.17 there is no plan: the model's configuration names all that a layer may have.
    """
    worker, facts = release.worker, release.facts
    model, ranks = int(worker.model_config.get_total_num_kv_heads()), int(worker.world_size)
    named = {model, *named_heads_of(worker.vllm_config)}
    if not facts.has_cache_groups:
        return PlannedHeads(frozenset((total, max(1, total // ranks)) for total in named))
    specs = _specs_of_rows(release, kinds)
    if any("MLA" in type(spec).__name__ for spec in specs):  # latents, which each rank has whole
        return PlannedHeads()
    has_groups = len(transferred_groups(worker.kv_cache_config, facts)) > 1
    may_overlay = has_groups and release.stated_layout in LAYERS_INSIDE_BLOCKS
    shapes = {(spec.num_kv_heads, spec.head_size, spec.block_size) for spec in specs}
    return PlannedHeads(
        frozenset(
            (total, own)
            for own in {int(spec.num_kv_heads) for spec in specs}
            for total in totals_of(own, ranks, named)
        ),
        is_one_shape=len(shapes) <= 1 and not has_groups,
        overlays_pages=may_overlay and overlay_unlike(_pages_of_rows(worker, kinds).values()),
    )


def most_heads(release: ReleaseWorker, kinds: Mapping[str, Kind]) -> int:
    """Returns the most KV heads that a layer has on one of our ranks; of latents 0.

    Beside latents a draft model has some. <= 0.17 there is no plan to tell.
    """
    specs = _specs_of_rows(release, kinds) if release.facts.has_cache_groups else ()
    with_heads = (int(one.num_kv_heads) for one in specs if "MLA" not in type(one).__name__)
    return max(with_heads, default=0)


def _specs_of_rows(release: ReleaseWorker, kinds: Mapping[str, Kind]) -> list[Any]:
    found = (release.spec_of(layer) for layer, kind in kinds.items() if kind.holds is Holds.ROWS)
    return [spec for spec in found if hasattr(spec, "num_kv_heads")]


# --- pages, and those that no region has -------------------------------------------------------


def _pages_of_rows(worker: Any, kinds: Mapping[str, Kind]) -> dict[str, tuple[int, int]]:
    """Returns by layer of rows where its first page begins, and its bytes."""
    return {
        layer: (cache.data_ptr(), cache[0].nbytes)
        for layer, cache in worker.device_kv_caches.items()
        if kinds[layer].holds is Holds.ROWS
    }


def missed_layer(release: ReleaseWorker, kinds: Mapping[str, Kind]) -> str:
    """Returns a layer of heads whose page the release reads from no P, or ""."""
    worker, facts = release.worker, release.facts
    if not facts.names_regions or release.stated_layout not in LAYERS_INSIDE_BLOCKS:
        return ""
    # Of rings and of MLA's rows more is known elsewhere; a mirror has other addresses.
    if worker._is_csa_linear or worker.use_mla or worker.use_host_buffer:
        return ""
    pages = _pages_of_rows(worker, kinds)
    pages = {layer: page for layer, page in pages.items() if layer in worker._layer_specs}
    readers = readers_of_regions(release)
    return missed_page(pages, release.addresses, release.region_block_bytes, readers) or ""


# --- smaller blocks, which the release joins to larger ones ---------------------------------


def why_misread(release: ReleaseWorker, heads: int) -> str:
    """Returns why the release puts wrong bytes into larger blocks, whatever the request, or "".

    Args:
        heads: as :func:`most_heads` returns them.
    """
    contexts = max(release.context_sizes[:1], default=1)
    is_mla, layout = bool(release.worker.use_mla), release.stated_layout
    order, facts = release.key_order(), release.facts
    return why_joined_wrongly(order, contexts, layout, facts, heads=heads, is_mla=is_mla)


def why_joined_wrongly(
    key_order: KeyOrder | None,
    decode_contexts: int,
    layout: str | None,
    facts: ReleaseFacts,
    *,
    heads: int,
    is_mla: bool,
) -> str:
    """Does the same by what is known of a cache.

    Args:
        key_order: None where nobody knows it.
        decode_contexts: ranks that share out a block's tokens.
        heads: as :func:`most_heads` returns them.
    """
    if key_order is not KeyOrder.ROW_MAJOR:
        return "takes keys that the backend keeps by column for rows"
    if decode_contexts > 1 and not facts.states_context_parallelism:
        return "does not know that ranks share out the tokens of a block"
    as_latents = "joins blocks of a draft model's heads as if they held latents"
    if facts.pairs_heads_by_layout:
        if heads <= 1:  # of which it makes the same bytes whatever it takes them for
            return ""
        if is_mla:  # whose tokens are whole rows
            return "" if layout in ("NHD", "LBNHC") else as_latents
        is_apart = layout in ("BLNHC", "BHLNC")
        return f"joins blocks of layout {layout} in the order of BLHNC" if is_apart else ""
    if is_mla and heads:
        return as_latents
    if is_mla:  # [block, 1, token, channel], of which it takes the second for tokens
        return "zeroes all of a prompt's last block (0.29 to 0.31)" if facts.names_layouts else ""
    if facts.cache_shape != "keys first":
        return "puts heads in wrong places of larger blocks (0.23 to 0.31)"
    return "" if layout == "HND" else "takes NHD for HND in larger blocks"
