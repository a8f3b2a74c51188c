"""Which of a worker's caches digests are made of, and where a request's tokens lie in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvpatch.connector.local.kv_cache_groups import Group
from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.segments import BlockList
from kvpatch.transfer.cache_digests import memories_of
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.table_digests import DigestStream, TableTokens

if TYPE_CHECKING:
    import torch


class CoveredCaches:
    """One worker's.

    Args:
        tensors: by layer, where the caches lie.
        planes: of all layers that peers read, or that are read into.
        groups: the layers of each block table.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        planes: Sequence[Plane],
        groups: Sequence[Group],
    ) -> None:
        self._tensors = {plane.layer: tensors[plane.layer] for plane in planes}
        self._groups = groups
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
