"""Digests of cached tokens, made where the cache lies: a few operations on many layers at once.

The numbers are those of ``digests.py``. Planes that differ only in where they lie are read
together, some MiB at a time: gathered block by block, multiplied as words of 32 bits, and added up.
On the host numpy's einsum does the last two in one pass; a device has no product of whole-number
matrices and does them in two operations, or all of it in one launch where Triton runs
(``digest_kernel.py``).

On one core with AVX-512 einsum takes 2.1 (4 MiB) to 5.6 times (256 KiB) as long as a plain copy of
the bytes; products in ``int64`` by torch take 4 to 24 times as long, in ``float64`` 3 to 17.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpatch.checks.digest_pieces import Alike, DigestPiece
from kvpatch.checks.digests import (
    Digests,
    Extent,
    Weights,
    ranges_of,
    rows_of,
)
from kvpatch.core.errors import DigestsRefused
from kvpatch.geometry.plane import Content, HeadName, Plane, planes_without
from kvpatch.geometry.segments import BlockList, Int64Array
from kvpatch.transfer.cores import use_all_cores
from kvpatch.transfer.one_memory import Bytes, one_memory, storage_of, streams_of

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.digests")

#: Of the cache at once; what is made of it takes twice as much more on a device. The thread that
#: makes digests does nothing else for as long as that takes.
SLICE_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class TableTokens:
    """The tokens of one block table's layers that are to be digested.

    The caller ensures that the blocks are the request's own until the digests are made.

    Attributes:
        tensors: of all layers, which keep the memory there is; another thread may read it.
        memories: that the planes lie in, by layer (:func:`memories_of`).
        planes: whose blocks these count. Content that each rank has of its own, such as recurrent
            state, has the rank's number as its head.
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
        return replace(self, planes=tuple(planes_without(self.planes, heads)))

    def without_contents(self, contents: Collection[Content]) -> TableTokens:
        planes = tuple(plane for plane in self.planes if plane.content not in contents)
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

    def alike(self) -> list[Alike]:
        """Returns the planes that are read together."""
        kinds: dict[object, list[Plane]] = {}
        for plane in self.planes:
            shape = plane.strides_bytes[1:], plane.counts[1:], plane.tile
            kind = self.memories[plane.layer].address, shape, plane.item_bytes, plane.is_whole
            kinds.setdefault(kind, []).append(plane)
        return [Alike(self.memories[planes[0].layer], planes) for planes in kinds.values()]

    def digests(
        self,
        extents: Sequence[Extent],
        range_tokens: int,
        weights: Weights,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Digests | None:
        """Makes the digests of runs of tokens, in ranges that a mismatch is located to.

        A block that is a whole belongs to the range that its first token lies in.

        Args:
            goes_on: False ends it, asked after each piece; None is returned then.

        Raises:
            DigestsRefused: the blocks are not of these planes, or have no room for the tokens.
        """
        ranges = [extent for run in extents for extent in ranges_of(*run, range_tokens)]
        heads: list[HeadName] = []
        sums = [np.zeros((0, len(ranges)), dtype=np.uint64)]
        for alike in self.alike():
            shape = len(alike.planes), alike.planes[0].counts.heads, len(ranges)
            cells = np.zeros(shape, dtype=np.uint64)
            for piece in self.pieces(alike, extents, range_tokens, weights):
                cells[piece.planes, :, piece.ranges] += sums_of(piece).cpu().numpy().view(np.uint64)
                if not goes_on():
                    return None
            heads += [
                (plane.layer, plane.content, head)
                for plane in alike.planes
                for head in range(plane.first_head, plane.end_head)
            ]
            sums.append(cells.reshape(-1, len(ranges)))
        return Digests(weights.seed, tuple(ranges), tuple(heads), np.concatenate(sums))

    def pieces(
        self, alike: Alike, extents: Sequence[Extent], range_tokens: int, weights: Weights
    ) -> Iterator[DigestPiece]:
        """Cuts runs of tokens, by blocks and then by planes."""
        blocks, size, done = self.blocks, self.blocks.block_tokens, 0
        rows_per_token, words = rows_of(alike.row_bytes)
        of_words = weights.words(words)
        for first, end in extents:
            borders = self._borders(alike, first, end, range_tokens)
            stop = -(-int(borders[-1]) // size)
            at_once = max(1, SLICE_BYTES // alike.block_bytes)
            for block in range(int(borders[0]) // size, stop, at_once):
                ids = blocks.block_ids[block : min(block + at_once, stop)]
                inside = np.clip(borders - block * size, 0, ids.size * size) * rows_per_token
                filled = np.flatnonzero(np.diff(inside))
                columns = slice(int(filled[0]), int(filled[-1]) + 1)
                row = (blocks.first_token + block * size) * rows_per_token
                of_rows = weights.rows(row, row + ids.size * size * rows_per_token)
                numbers = alike.numbers(ids)
                planes = max(1, SLICE_BYTES // (ids.size * alike.block_bytes))
                for plane in range(0, len(alike.planes), planes):
                    yield DigestPiece(
                        alike,
                        slice(plane, plane + planes),
                        slice(done + columns.start, done + columns.stop),
                        numbers[plane : plane + planes],
                        of_words,
                        of_rows,
                        inside[columns.start : columns.stop + 1],
                    )
            done += borders.size - 1

    def _borders(self, alike: Alike, first: int, end: int, range_tokens: int) -> Int64Array:
        """Returns the borders of the ranges in a run, in tokens behind the first block's."""
        blocks, plane = self.blocks, alike.planes[0]
        if not blocks.first_token <= first < end <= blocks.end_token:
            raise DigestsRefused(
                f"expected some tokens of {blocks.first_token} to {blocks.end_token}, found "
                f"{first} to {end}"
            )
        available, highest = min(p.counts.blocks for p in alike.planes), blocks.block_ids.max()
        if plane.counts.block_tokens != blocks.block_tokens or highest >= available:
            raise DigestsRefused(
                f"expected blocks of {plane.counts.block_tokens} tokens below {available}, found "
                f"blocks of {blocks.block_tokens} up to {highest}"
            )
        ends = [last for _, last in ranges_of(first, end, range_tokens)]
        borders = np.array([first, *ends]) - blocks.first_token
        return (
            -(-borders // blocks.block_tokens) * blocks.block_tokens if plane.is_whole else borders
        )


def memories_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Bytes]:
    """Returns each layer's memory: one range for all if possible, so that one pass reads them."""
    everything = one_memory(tensors.values())
    return {layer: everything or storage_of(tensor) for layer, tensor in tensors.items()}


def sums_of(piece: DigestPiece) -> torch.Tensor:
    """[plane, head, range], on the device, in its current stream."""
    if piece.alike.memory.memory.device.type == "cuda":  # ROCm's devices too
        try:
            from kvpatch.checks.digest_kernel import sums_surely
        except ImportError:
            _LOG.debug("torch came without Triton: digests take longer", exc_info=True)
        else:
            return sums_surely(piece)
    return piece.sums_by_torch()


class DigestStream:
    """The place where a worker's digests are made: a thread, and on a device a stream."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._device = device
        self._stream: Any = None
        #: Begins with the first digest.
        self.thread = ThreadPoolExecutor(1, "kvpatch-digests", self._begin_thread)
        #: Held there while the cache is read. What is collected there may let go of a load.
        self.work = RLock()

    def _begin_thread(self) -> None:
        use_all_cores()
        if self._streams is not None:  # behind a stream it would go back to the first GPU
            self._streams.set_device(self._device)

    def settle(self) -> None:
        """Waits for all that is to be digested."""
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
