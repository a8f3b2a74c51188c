"""Makes digests of a request's tokens in a worker's caches, some at a time."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpatch.checks.digests.cache_digests import CacheDigests, memories_of
from kvpatch.checks.digests.digest_weights import Weights
from kvpatch.checks.digests.digests import Digests, Extent
from kvpatch.geometry.plane import Content, Counts, HeadName, Plane, Strides, planes_without
from kvpatch.geometry.segments import BlockList
from kvpatch.geometry.state_shares import Rank
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.transfer.cores import use_all_cores
from kvpatch.transfer.one_memory import Bytes, streams_of
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.recurrent_state import StatePages, tensors_of

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.digests")

#: Of the cache at once: of no longer time is nothing else done by who makes them.
LOT_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class TableTokens:
    """The tokens of one block table's layers that are to be digested.

    Attributes:
        tensors: of all layers, which keep the memory there is; another thread may look at it.
        memories: that the planes lie in, by layer.
        planes: whose blocks these count.
        blocks: the request's.
        first_token, end_token: what is known to be its own of them.
    """

    tensors: Mapping[str, torch.Tensor]
    memories: Mapping[str, Bytes]
    planes: tuple[Plane, ...]
    blocks: BlockList
    first_token: int
    end_token: int

    @property
    def cells(self) -> int:
        """Returns the number of cells of one range of tokens."""
        return sum(plane.counts.heads for plane in self.planes)

    @property
    def rows(self) -> int:
        """Tokens, once for each plane."""
        return len(self.planes) * max(0, self.end_token - self.first_token)

    def without_heads(self, heads: Collection[HeadName]) -> TableTokens:
        """The same without some of the planes' heads."""
        if not heads:
            return self
        return replace(self, planes=tuple(planes_without(self.planes, heads)))

    def without_content(self, content: Content) -> TableTokens:
        planes = tuple(plane for plane in self.planes if plane.content is not content)
        return replace(self, planes=planes)

    def without_open_blocks(self) -> list[TableTokens]:
        """The same without the last block of planes that move whole, where it is not full.

        What is behind its last token moves along, and is anything: of ranks that all have the
        plane, each has its own, and nobody says whose was placed last where several are read.
        """
        size = self.blocks.block_tokens
        rows = tuple(plane for plane in self.planes if not plane.is_whole)
        whole = tuple(plane for plane in self.planes if plane.is_whole)
        parts = (rows, self.end_token), (whole, self.end_token // size * size)
        return [replace(self, planes=planes, end_token=end) for planes, end in parts if planes]

    def made(
        self, extents: Sequence[Extent], range_tokens: int, weights: Weights
    ) -> Iterator[Digests]:
        """Digests of runs of ranges, as many tokens at a time as take no long time.

        Raises:
            DigestsRefused: the blocks are not of these planes, or have no room for the tokens.
        """
        digests = CacheDigests(self.memories, self.planes, range_tokens)
        token_bytes = sum(
            plane.counts.heads * plane.counts.channels * plane.item_bytes for plane in self.planes
        )
        ranges = max(1, LOT_BYTES // (token_bytes * range_tokens))
        for first, end in extents:
            start = first
            while start < end:
                lot_end = min(end, (start // range_tokens + ranges) * range_tokens)
                yield digests.begin(self.blocks, start, lot_end, weights).read()
                start = lot_end


class DigestStream:
    """The place where a worker's digests are made: on a device, a stream of their own.

    Args:
        device: of the cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._device = device
        self._stream: Any = None
        #: Loads are compared on it. It begins with the first of them.
        self.thread = ThreadPoolExecutor(1, "kvpatch-compares", use_all_cores)
        #: Held there while the cache is read. What is collected there may let go of a load.
        self.work = RLock()

    def settle(self) -> None:
        try:
            self.thread.submit(int).result()
        except RuntimeError as error:  # the interpreter ends
            _LOG.debug("nothing is compared any more: %s", error)

    def mark(self) -> Any:
        """Marks the device work that the engine's thread has queued; None if work ends at once."""
        if self._streams is None:
            return None
        event = self._streams.Event()
        event.record(self._streams.current_stream(self._device))
        return event

    def inside(self, after: Any = None) -> AbstractContextManager[Any]:
        """Makes digests in the stream, while inside.

        Args:
            after: what :meth:`mark` returned; it comes after that.
        """
        if self._streams is None:
            return nullcontext()
        if self._stream is None:
            self._stream = self._streams.Stream(device=self._device)
        if after is not None:
            self._stream.wait_event(after)
        entered: AbstractContextManager[Any] = self._streams.stream(self._stream)
        return entered


class CoveredCaches:
    """The caches of one worker that digests cover.

    Args:
        tensors: the caches by layer.
        planes: the planes of all layers that peers read, or that are read into.
        groups: the layers of each block table.
        states: the pages of layers with recurrent state, where they lie.
        rank: the rank that these states belong to.
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
