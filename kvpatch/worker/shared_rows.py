"""Rows of blocks in which layers of unlike kinds overlay one another: what vLLM copies of them.

A model with a ring (vLLM: CSA-linear, from 0.29 on) has its blocks outermost. A block is one row of
memory, in which the pages of one group's layers lie side by side, each group's from the row's
beginning on. vLLM copies a row by regions. A region begins wherever some layer's page does, has the
length of one of the layers that begin there, and is read for the blocks of every attention group,
whichever layer of it lies there; where a model has no states, from 0.30 on, for those of the one
group whose layers begin there, or of every group where layers of several do. So what comes is right
between equal rows whose pages are covered so, and else only where no region of another group's
begins inside a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from kvpatch.geometry.layout_strides import LAYERS_INSIDE_BLOCKS
from kvpatch.worker.kv_cache_groups import transferred_groups
from kvpatch.worker.recurrent_state import sizes_of_states
from kvpatch.worker.release_worker import ReleaseWorker

#: Of a region, as the release counts groups: it is read for the blocks of every one.
_EVERY_GROUP = -1


class Holder(Enum):
    """The part of a page that each rank has."""

    HEADS = auto()
    WHOLE = auto()
    RING = auto()
    STATE = auto()
    WHOLE_STATE = auto()


class Region(NamedTuple):
    """A part of every row, as a handshake states it; counted from where the first one begins."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class Page(NamedTuple):
    """A layer's part of the rows of its group, as far as something lies in it."""

    layer: str
    group: int
    region: Region
    holder: Holder


@dataclass(frozen=True)
class SharedRows:
    """The rows of one rank.

    Attributes:
        regions: in the order in which a handshake states them.
        whole: of each, whether it is read as one that every rank has whole.
        state_bytes: what is copied of a state that every rank has whole; None for its region's.
        groups: of each region, the one whose blocks it is read for; empty where each is for all.
        row_bytes: from one row to the next; 0 where that is not known.
    """

    regions: tuple[Region, ...]
    whole: tuple[bool, ...]
    pages: tuple[Page, ...]
    heads: int
    state_bytes: int | None = None
    groups: tuple[int, ...] = ()
    row_bytes: int = 0

    def copied_short(self) -> tuple[Page, int] | None:
        """Returns the first page that is copied in part even between equal rows, and the bytes that
        come.

        Of the states that ranks share out the release copies the states and no region.
        """
        for page in self.pages:
            if page.holder is not Holder.STATE:
                copied = _reach(page.region.offset, self._read_for(page)) - page.region.offset
                if copied < page.region.size_bytes:
                    return page, copied
        return None

    def _read_for(self, page: Page) -> list[Region]:
        own = [region for region in self.regions if region.offset == page.region.offset]
        if page.holder is Holder.WHOLE_STATE:
            return own if self.state_bytes is None else [Region(own[0].offset, self.state_bytes)]
        has_states = any(p.holder in (Holder.STATE, Holder.WHOLE_STATE) for p in self.pages)
        if page.holder is Holder.RING and has_states:
            rings = {p.region.offset for p in self.pages if p.holder is Holder.RING}
            return [region for region in self.regions if region.offset in rings]
        if not self.groups:
            return list(self.regions)
        groups = zip(self.regions, self.groups, strict=True)
        return [region for region, group in groups if group in (page.group, _EVERY_GROUP)]

    def has_equal_rows(self, regions: Sequence[Region], ranks: tuple[int, int]) -> bool:
        """True if every byte lies at a peer where it does here, with as many ranks as heads."""
        return min(ranks) >= self.heads and tuple(regions) == self.regions

    def has_other_rows(self, regions: Sequence[Region]) -> bool:
        """True if some byte lies elsewhere at a peer, where both have one piece of memory."""
        ends = [region.end for region in (*self.regions, *regions)]
        return max(ends, default=0) <= self.row_bytes and tuple(regions) != self.regions

    def is_cut_by_page(self) -> bool:
        """True if each region that is read for an attention block is a page of its group's."""
        holders = [Holder.WHOLE if whole else Holder.HEADS for whole in self.whole]
        for group in {p.group for p in self.pages if p.holder in (Holder.HEADS, Holder.WHOLE)}:
            pages = {p.region: p.holder for p in self.pages if p.group == group}
            end = max(region.end for region in pages)
            found = [
                pages.get(r) is holder for r, holder in zip(self.regions, holders, strict=True)
            ]
            inside = [region for region in self.regions if region.offset < end]
            if not sum(found) == len(pages) == len(inside):
                return False
        return True

    def misread_ring(self, ranks: tuple[int, int]) -> Page | None:
        """Returns a ring of which a share is read, where rows are cut by page."""
        theirs, ours = ranks
        shares = theirs // ours
        whole = {r.offset for r, whole in zip(self.regions, self.whole, strict=True) if whole}
        sizes = {r.offset: r.size_bytes for r in self.regions}
        for page in self.pages:
            if page.holder is not Holder.RING or page.region.offset in whole:
                continue
            if not shares or page.region.size_bytes * shares > sizes[page.region.offset]:
                return page
        return None


def _reach(offset: int, regions: Iterable[Region]) -> int:
    """Up to where bytes come without a gap."""
    for region in sorted(regions):
        if region.offset <= offset < region.end:
            offset = region.end
    return offset


def regions_of(addresses: Sequence[int], block_bytes: Sequence[int]) -> tuple[Region, ...]:
    first = min(addresses, default=0)
    places = zip(addresses, block_bytes, strict=False)
    return tuple(Region(address - first, size) for address, size in places)


def shared_rows(release: ReleaseWorker) -> SharedRows | None:
    """The rows of a worker, once it has registered; None where it has no ring, or no rows."""
    worker, facts = release.worker, release.facts
    if not facts.names_layouts or not worker._is_csa_linear:
        return None
    if release.stated_layout not in LAYERS_INSIDE_BLOCKS:
        return None
    first = min(release.addresses)
    pages = tuple(
        Page(layer, group, *_held(release, layer, first))
        for group, planned in enumerate(transferred_groups(worker.kv_cache_config, facts))
        for layer in planned.layer_names
        if layer in worker.device_kv_caches
    )
    has_groups = "region_group_ids" in facts.agent_metadata and not worker._has_mamba
    has_groups = has_groups and worker._uses_region_group_mapping
    return SharedRows(
        regions_of(release.addresses, release.region_block_bytes),
        tuple(map(bool, worker._region_is_mla)),
        pages,
        int(worker.model_config.get_total_num_kv_heads()),
        worker._ple_block_len if "ple_block_len" in facts.agent_metadata else None,
        tuple(worker.region_group_ids) if has_groups else (),
        max(worker.block_stride_per_layer, default=0),
    )


def _held(release: ReleaseWorker, layer: str, first: int) -> tuple[Region, Holder]:
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
    )

    spec = release.spec_of(layer)
    offset = release.worker.device_kv_caches[layer].data_ptr() - first
    if hasattr(spec, "shapes"):
        size = sum(sizes_of_states(spec))
        return Region(offset, size), Holder.WHOLE_STATE if spec.tp_replicated else Holder.STATE
    region = Region(offset, int(spec.page_size_bytes))
    if isinstance(spec, CircularBufferSpec):
        return region, Holder.RING
    is_whole = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    return region, Holder.WHOLE if is_whole else Holder.HEADS
