"""The places of a block's bytes in a storage and in its copy in host memory, and the copies.

A block's bytes in one storage are a few rows: all of them where blocks are outermost; one for keys
and one for values where those are apart; one a layer, or one a layer and head. The copy has the
same rows in the same order, and as many of them as there are host blocks: strides inside a block
stay, and strides across blocks shrink.

torch gathers each row of blocks, on a device with streams in one of their own, so that the model
goes on meanwhile. Tensors without a storage (TPU, XLA) are copied by ``HostPool`` with
``transfer/storageless.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpatch.core.errors import RegistrationRefused
from kvpatch.geometry.plane import axes_nest, extent_bytes
from kvpatch.geometry.segments import Int64Array
from kvpatch.transfer.one_memory import streams_of
from kvpatch.transfer.plane_bytes import integers_of, uploaded

if TYPE_CHECKING:
    import torch

_WIDEST_BYTES = 8
#: Of the device's memory at once, for blocks on their way.
_GATHERED_BYTES = 32 * 1024**2
_CURE = "use KVPATCH_HOST_BUFFER=never, where NIXL can register the memory of this device"


@dataclass(frozen=True)
class BlockTensor:
    """A layer's tensor in a storage; sizes and strides in elements.

    Attributes:
        offset_bytes: of the first element, in the storage.
        block_dimension: counts kernel blocks.
        parts: kernel blocks in a block.
    """

    layer: str
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    block_dimension: int
    parts: int

    @property
    def step_bytes(self) -> int:
        return self.strides[self.block_dimension] * self.parts * self.item_bytes

    def outer(self) -> tuple[int, ...]:
        """Dimensions that step over all blocks, be there only one."""
        step = self.strides[self.block_dimension]
        return tuple(
            dimension
            for dimension, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True))
            if dimension != self.block_dimension and size > 1 and stride >= step
        )

    def row_bytes(self) -> int:
        """Returns the bytes of one block under one index of the outer dimensions, gaps included."""
        axes = [
            (self.parts if dimension == self.block_dimension else size, stride * self.item_bytes)
            for dimension, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True))
            if dimension not in self.outer()
        ]
        return extent_bytes(axes, self.item_bytes)

    def starts(self) -> dict[tuple[int, ...], int]:
        """Offset of block 0's row under each index of the outer dimensions."""
        outer = self.outer()
        return {
            index: self.offset_bytes
            + sum(i * self.strides[d] for i, d in zip(index, outer, strict=True)) * self.item_bytes
            for index in product(*(range(self.shape[d]) for d in outer))
        }

    def check(self) -> None:
        axes = [
            (size, stride * self.item_bytes)
            for size, stride in zip(self.shape, self.strides, strict=True)
        ]
        if min(self.shape) < 1 or min(self.strides) < 0 or not axes_nest(axes, self.item_bytes):
            raise RegistrationRefused(
                f"layer {self.layer}: shape {self.shape} and strides {self.strides} overlap or "
                "are empty, so that no host block can hold a block",
                _CURE,
            )


class Rows(NamedTuple):
    """The same run of bytes of every block of a storage, and of every host block of its copy.

    Attributes:
        start: offset of block 0's, in the storage.
        step_bytes: from block to block, and from host block to host block.
        row_bytes: of one.
        target: offset of host block 0's, in the copy.
    """

    start: int
    step_bytes: int
    row_bytes: int
    target: int = 0


class StorageCopy(NamedTuple):
    """A storage's bytes, its host blocks' bytes in host memory, and what to copy between them."""

    source: torch.Tensor
    host: torch.Tensor
    rows: tuple[Rows, ...]


@dataclass(frozen=True)
class HostStorage:
    """A storage's copy with host blocks for blocks.

    Attributes:
        places: of each layer's tensor: (offset in bytes, shape, strides in elements).
    """

    size_bytes: int
    rows: tuple[Rows, ...]
    places: Mapping[str, tuple[int, tuple[int, ...], tuple[int, ...]]]


def rows_of(tensors: Sequence[BlockTensor], blocks: int) -> tuple[Rows, ...]:
    """The distinct rows of a block in one storage, by their place.

    Tensors that lie in each other, or beside each other inside a block, share a row.

    Raises:
        RegistrationRefused: tensors lie across each other, or overlap themselves.
    """
    for tensor in tensors:
        tensor.check()
    found = sorted(
        (start, tensor.step_bytes, tensor.row_bytes(), tensor.layer)
        for tensor in tensors
        for start in tensor.starts().values()
    )
    merged: list[Rows] = []
    for start, step, size, layer in found:
        last = merged[-1] if merged else None
        if last is None or start >= last.start + (blocks - 1) * last.step_bytes + last.row_bytes:
            merged.append(Rows(start, step, size))
            continue
        both = max(last.row_bytes, start - last.start + size)
        if step != last.step_bytes or both > step:
            raise RegistrationRefused(
                f"layer {layer}: blocks of {size} bytes, {step} apart from offset {start} on, lie "
                f"across others of {last.row_bytes} bytes, {last.step_bytes} apart from "
                f"{last.start} on: a host buffer cannot hold some of them alone",
                _CURE,
            )
        merged[-1] = Rows(last.start, step, both)
    return tuple(merged)


def host_storage(tensors: Sequence[BlockTensor], blocks: int, host_blocks: int) -> HostStorage:
    """The copy of one storage's tensors that has `host_blocks` for `blocks`.

    Raises:
        RegistrationRefused: they are not laid out in blocks.
    """
    alignment = max(tensor.item_bytes for tensor in tensors)
    rows, end = [], 0
    for row in rows_of(tensors, blocks):
        rows.append(row._replace(target=-(-end // alignment) * alignment))
        end = rows[-1].target + row.step_bytes * host_blocks
    places = {tensor.layer: _place(tensor, rows, host_blocks) for tensor in tensors}
    return HostStorage(end, tuple(rows), places)


def _place(
    tensor: BlockTensor, rows: Sequence[Rows], host_blocks: int
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    begins = [row.start for row in rows]
    starts = {}
    for index, start in tensor.starts().items():
        row = rows[bisect_right(begins, start) - 1]
        starts[index] = row.target + start - row.start
    outer = tensor.outer()
    origin = starts[(0,) * len(outer)]
    strides = list(tensor.strides)
    for position, dimension in enumerate(outer):
        one = tuple(int(other == position) for other in range(len(outer)))
        strides[dimension] = (starts[one] - origin) // tensor.item_bytes
    for index, start in starts.items():
        steps = sum(i * strides[d] for i, d in zip(index, outer, strict=True)) * tensor.item_bytes
        if origin + steps != start:
            raise RegistrationRefused(
                f"layer {tensor.layer}: shape {tensor.shape} and strides {tensor.strides} have "
                "other tensors between them at uneven distances, so that no tensor of host blocks "
                "has their form",
                _CURE,
            )
    shape = list(tensor.shape)
    shape[tensor.block_dimension] = host_blocks * tensor.parts
    return origin, tuple(shape), tuple(strides)


class BlockCopies:
    """Copies whole blocks. On a device with streams they are there after :meth:`settle`.

    Args:
        copies: every storage's.
        device: of the blocks.
        blocks, host_blocks: how many there are of each.
    """

    def __init__(
        self, copies: Sequence[StorageCopy], device: torch.device, blocks: int, host_blocks: int
    ) -> None:
        self._copies = copies
        self._device = device
        self._blocks = blocks
        self._host_blocks = host_blocks
        self._streams = streams_of(device)
        self._stream: Any = None
        self._event: Any = None

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks into host blocks, after all that the device was told."""
        import torch

        into = np.asarray(host_blocks, dtype=np.int64)
        order = np.argsort(into)
        of, into = np.asarray(blocks, dtype=np.int64)[order], into[order]
        if self._streams is None:
            self._copy(torch.from_numpy(of).to(self._device), into)
            return
        if self._stream is None:
            self._stream = self._streams.Stream(device=self._device)
        current = self._streams.current_stream(self._device)
        with self._streams.stream(self._stream):
            (indices,) = uploaded([of], self._device)
            self._stream.wait_stream(current)
            self._copy(indices, into)
            self._event = self._streams.Event()
            self._event.record(self._stream)

    def settle(self) -> None:
        """Waits until all that was saved is in host memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def _copy(self, indices: torch.Tensor, host_blocks: Int64Array) -> None:
        """Gathers rows of as many blocks at once as take little of the device's memory."""
        for source, host, all_rows in self._copies:
            ends = gcd(_WIDEST_BYTES, source.data_ptr(), host.data_ptr())
            for rows in all_rows:
                unit = gcd(ends, *rows)  # the widest aligned items at both ends
                blocks = _view(source, rows, self._blocks, rows.start, unit)
                into = _view(host, rows, self._host_blocks, rows.target, unit)
                at_once = max(1, _GATHERED_BYTES // rows.row_bytes)
                for start in range(0, len(indices), at_once):
                    found = blocks.index_select(0, indices[start : start + at_once])
                    self._put(found, into, host_blocks[start : start + at_once])

    def _put(self, found: torch.Tensor, into: torch.Tensor, host_blocks: Int64Array) -> None:
        """Copies rows to their host blocks: those in one piece, where they follow one another."""
        is_broken = np.diff(host_blocks) != 1
        if not into.is_contiguous():
            is_broken[:] = True
        borders = [0, *(np.flatnonzero(is_broken) + 1).tolist(), len(host_blocks)]
        for first, end in pairwise(borders):
            host_block = int(host_blocks[first])
            into[host_block : host_block + end - first].copy_(
                found[first:end], non_blocking=self._streams is not None
            )


def _view(
    memory: torch.Tensor, rows: Rows, count: int, start: int, unit_bytes: int
) -> torch.Tensor:
    """[block or host block, units] of so many of them."""
    import torch

    return torch.empty(0, dtype=integers_of(unit_bytes), device=memory.device).set_(
        memory.untyped_storage(),
        start // unit_bytes,
        (count, rows.row_bytes // unit_bytes),
        (rows.step_bytes // unit_bytes, 1),
    )
