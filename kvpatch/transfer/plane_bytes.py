"""Bytes of tensors as whole numbers; a plane's, to be zeroed or to be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.plane_copies import CopyTile, parts_in_tiles, reach_of
from kvpatch.geometry.segments import Int64Array, Segments
from kvpatch.transfer.one_memory import Bytes

if TYPE_CHECKING:
    import torch

#: What no transfer covers, of planes of several layers: these tokens of these planes.
Tails = Iterable[tuple[Sequence[Plane], Segments]]


def integers_of(item_bytes: int) -> torch.dtype:
    """Whole numbers of so many bytes: 1, 2, 4 or 8."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item_bytes]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as whole numbers, which are compared and copied bit by bit."""
    return tensor.view(integers_of(tensor.element_size()))


def in_units(memory: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """The bytes as units, without a rest that fills none."""
    whole = memory[: memory.numel() // unit_bytes * unit_bytes]
    return whole.view(integers_of(unit_bytes))


def uploaded(numbers: Sequence[Int64Array], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Arrays of numbers on a device, in one copy.

    From pinned memory: a stream that waits for the model must not make this thread wait.
    """
    import torch

    flat = torch.from_numpy(np.concatenate([one.reshape(-1) for one in numbers]))
    if device.type != "cpu" and torch.accelerator.is_available():
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([one.size for one in numbers])
    return tuple(part.view(one.shape) for one, part in zip(numbers, parts, strict=True))


def plane_view(cache: torch.Tensor, plane: Plane) -> torch.Tensor:
    """[block, head, token, channel, byte of the item] of a plane, as a view.

    Of a tiled plane tokens and channels are two axes each; what is indexed by block can be
    reshaped.

    Args:
        cache: the tensor that the plane was read from.
    """
    import torch

    storage = cache.untyped_storage()
    sizes, strides = zip(*plane.axes, strict=True)
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        storage,
        plane.address - storage.data_ptr(),
        (*sizes, plane.item_bytes),
        (*strides, 1),
    )


def zero_tokens(cache: Bytes, plane: Plane, tail: Segments) -> None:
    """Zeroes what a transfer leaves untouched in the last block: stale bytes can be NaN.

    Args:
        cache: what the plane lies in.
        tail: local blocks and offsets (:func:`kvpatch.geometry.segments.uncovered_tail`).

    Raises:
        UnplannableCopy: the plane has no such block or token.
    """
    if not len(tail):
        return
    counts, reach = plane.counts, reach_of(tail)[1]
    if reach.lowest < 0 or reach.end_block > counts.blocks or reach.end_token > counts.block_tokens:
        raise UnplannableCopy(
            f"expected to zero tokens inside {plane}, found blocks up to "
            f"{reach.end_block - 1}, tokens up to {reach.end_token - 1} in a block"
        )
    # Counted from the start of the storage, of which this memory may be a part.
    start = cache.memory.storage_offset() + plane.address - cache.address
    for offset, tokens in _token_rows(plane, tail):
        axes = (plane.axes[1], *tokens, *plane.channel_axes, (plane.item_bytes, 1))
        sizes, strides = zip(*axes, strict=True)
        cache.memory.as_strided(sizes, strides, start + offset).zero_()


def _token_rows(plane: Plane, tail: Segments) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """(bytes behind the plane's address, axes of (size, stride) of tokens) of each segment."""
    block_stride, _, token, _ = plane.strides_bytes
    if plane.tile is None:
        for block, offset, tokens in _rows_of(tail):
            yield block * block_stride + offset * token, ((tokens, token),)
        return
    size, step = plane.tile.tokens, plane.tile.token_step
    for part in parts_in_tiles(tail, CopyTile(size, step, step, is_remote=True, is_local=True)):
        for block, offset, tiles in _rows_of(part.segments):
            start = block * block_stride + offset * token + part.local_first * step
            yield start, ((tiles, token), (part.tokens, step))


def _rows_of(tail: Segments) -> Iterator[tuple[int, int, int]]:
    columns = (tail.local_block, tail.local_offset, tail.tokens)
    return zip(*(column.tolist() for column in columns), strict=True)
