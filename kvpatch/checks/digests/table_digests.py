"""Makes digests of a request's tokens in one block table, some at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvpatch.checks.digests.cache_digests import CacheDigests
from kvpatch.checks.digests.digest_weights import Weights
from kvpatch.checks.digests.digests import Digests, Extent
from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.plane_heads import HeadName, planes_without
from kvpatch.geometry.segments import BlockList
from kvpatch.transfer.caches import side_streams
from kvpatch.transfer.one_memory import Bytes

if TYPE_CHECKING:
    import torch

#: Of the cache at once: of no longer time is nothing else done by who makes them.
LOT_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class TableTokens:
    """What is to be digested of the layers of one block table.

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
        """Of one range of tokens."""
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
        """The same without planes of one kind."""
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
    """Where a worker's digests are made: on a device in a stream of their own.

    Args:
        device: of the cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = side_streams(device)
        self._device = device
        self._stream: Any = None

    def mark(self) -> Any:
        """What the engine's thread has told the device by now; None where it is done at once."""
        if self._streams is None:
            return None
        event = self._streams.Event()
        event.record(self._streams.current_stream(self._device))
        return event

    def inside(self, after: Any = None) -> AbstractContextManager[Any]:
        """While inside, what is made is made in the stream.

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
