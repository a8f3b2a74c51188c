"""Which of a worker's caches digests are made of, and where a request's tokens lie in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from kvpatch.checks.digests.cache_digests import memories_of
from kvpatch.checks.digests.table_digests import LOT_BYTES, DigestStream, TableTokens
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.plane import Content, Counts, Plane, Strides
from kvpatch.geometry.segments import BlockList
from kvpatch.geometry.state_shares import Rank
from kvpatch.transfer.one_memory import Bytes
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.recurrent_state import StatePages, tensors_of


class CoveredCaches:
    """One worker's.

    Args:
        tensors: by layer, where the caches lie.
        planes: of all layers that peers read, or that are read into.
        groups: the layers of each block table.
        states: the pages of layers with recurrent state, where they lie.
        rank: whose states these are.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        planes: Sequence[Plane],
        groups: Sequence[Group],
        states: Mapping[str, StatePages],
        rank: Rank,
    ) -> None:
        layers = [*(plane.layer for plane in planes), *states]
        self._tensors = {layer: tensors_of(tensors[layer])[0] for layer in layers}
        self._groups = groups
        self._states = {
            layer: _state_plane(layer, pages, rank, planes[0].memory)
            for layer, pages in states.items()
        }
        # Each rank has all of a latent, and calls it by the first of its own heads.
        self._planes = [
            replace(plane, first_head=0) if plane.content is Content.LATENT else plane
            for plane in planes
        ]
        self.stream = DigestStream(next(iter(self._tensors.values())).device)

    @cached_property
    def _memories(self) -> dict[str, Bytes]:
        return memories_of(self._tensors)

    @cached_property
    def _by_group(self) -> list[tuple[Plane, ...]]:
        return [
            tuple(plane for plane in self._planes if plane.layer in group.layers)
            for group in self._groups
        ]

    def table(self, number: int, blocks: BlockList, extent: tuple[int, int]) -> TableTokens | None:
        """A group's layers and a request's blocks; None where it has none of either.

        Args:
            extent: the tokens that are known to be the request's own.
        """
        planes = self._by_group[number]
        first, end = max(extent[0], blocks.first_token), min(extent[1], blocks.end_token)
        if not planes or first >= end:
            return None
        return TableTokens(self._tensors, self._memories, planes, blocks, first, end)

    def states(self, number: int, block: int) -> list[TableTokens]:
        """A group's recurrent states of a request, some layers at a time.

        A layer's are one token of one block.
        """
        planes = [self._states[layer] for layer in sorted(self._groups[number].layers)]
        blocks = BlockList(np.array([block]), 1)
        at_once = max(1, LOT_BYTES // max(plane.counts.channels for plane in planes))
        lots = (tuple(planes[at : at + at_once]) for at in range(0, len(planes), at_once))
        return [TableTokens(self._tensors, self._memories, lot, blocks, 0, 1) for lot in lots]


def _state_plane(layer: str, pages: StatePages, rank: Rank, memory: Memory) -> Plane:
    """A layer's states as rows of bytes that one rank alone has.

    The rank's number stands where a head's does: one of other ranks has another share of a state,
    and is compared with none.
    """
    size = pages.size_bytes
    return Plane(
        layer,
        Content.STATE,
        pages.address,
        Strides(pages.stride_bytes, size, size, 1),
        Counts(pages.blocks, 1, 1, size),
        item_bytes=1,
        first_head=rank.ranks * (rank.ranks - 1) // 2 + rank.number,
        memory=memory,
    )
