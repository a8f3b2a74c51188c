"""Places what has landed in a staging buffer: strided copies in local memory.

One copy for every class of segments (same offsets, same length) of a placement, over
all of its blocks at once: numpy for host memory, where it is about twice as fast as
torch, and torch for everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpatch.geometry import Placement
from kvpatch.geometry.meetings import contiguous

if TYPE_CHECKING:
    import torch

Int64Array = npt.NDArray[np.int64]

_WIDEST_BYTES = 8


class Move(NamedTuple):
    """One strided copy: for every pair of a slot and a block, the same pattern of units.

    Attributes:
        unit_bytes: of what is moved at once: 1, 2, 4 or 8.
        shape: of the pattern, in units.
        source, target: byte offset of slot 0's and block 0's pattern.
        source_strides, target_strides: bytes along the pattern's axes.
        source_step, target_step: bytes from slot to slot and from block to block.
    """

    unit_bytes: int
    shape: tuple[int, ...]
    source: int
    source_step: int
    source_strides: tuple[int, ...]
    target: int
    target_step: int
    target_strides: tuple[int, ...]
    slots: Int64Array
    blocks: Int64Array


def moves_of(placement: Placement, cache_address: int) -> Iterator[Move]:
    """The strided copies of one placement into a cache that starts at ``cache_address``."""
    strides = placement.strides
    for kind in placement.segments.kinds:
        run, axes = contiguous(strides, kind.tokens)
        axes.sort(key=lambda axis: -axis.local_stride)
        source = placement.staging_offset + kind.remote_offset * strides.token.remote_stride
        target = placement.local_address - cache_address
        target += kind.local_offset * strides.token.local_stride
        steps = strides.block.remote_stride, strides.block.local_stride
        numbers = [run, source, target, *steps]
        numbers += [number for axis in axes for number in axis[1:]]
        unit = gcd(_WIDEST_BYTES, *numbers)
        yield Move(
            unit,
            (*(axis.size for axis in axes), run // unit),
            source,
            steps[0],
            (*(axis.remote_stride for axis in axes), unit),
            target,
            steps[1],
            (*(axis.local_stride for axis in axes), unit),
            kind.remote_block,
            kind.local_block,
        )


def place_in_host_memory(
    staging: npt.NDArray[np.uint8],
    cache: npt.NDArray[np.uint8],
    cache_address: int,
    placement: Placement,
) -> None:
    """Copies one placement's bytes from a round's buffer into a cache.

    Args:
        staging: the buffer's bytes, one-dimensional.
        cache: all bytes of the cache's allocation, one-dimensional and writable.
    """
    for move in moves_of(placement, cache_address):
        unit = np.dtype(f"u{move.unit_bytes}")
        source, target = (
            np.ndarray((_reach(which), *move.shape), unit, memory, offset, strides=(step, *strides))
            for memory, which, offset, step, strides in (
                (staging, move.slots, move.source, move.source_step, move.source_strides),
                (cache, move.blocks, move.target, move.target_step, move.target_strides),
            )
        )
        target[move.blocks] = source[_slots(move.slots)]


class Indices:
    """Block numbers on a device, uploaded once for all layers of a round."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, tuple[Int64Array, torch.Tensor]] = {}

    def of(self, numbers: Int64Array) -> torch.Tensor:
        """The numbers as a tensor; they are kept, so that no others take their id."""
        import torch

        if id(numbers) not in self._known:
            self._known[id(numbers)] = numbers, torch.from_numpy(numbers).to(self._device)
        return self._known[id(numbers)][1]


def place_on_device(
    staging: torch.Tensor,
    cache: torch.Tensor,
    cache_address: int,
    placement: Placement,
    indices: Indices,
) -> None:
    """As :func:`place_in_host_memory`, on the device of both, in its current stream.

    Args:
        staging, cache: ``uint8``, one-dimensional, on one device.
    """
    import torch

    units = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for move in moves_of(placement, cache_address):
        unit = units[move.unit_bytes]
        source, target = (
            _strided(_in_units(memory, unit, move.unit_bytes), move, which, offset, step, strides)
            for memory, which, offset, step, strides in (
                (staging, move.slots, move.source, move.source_step, move.source_strides),
                (cache, move.blocks, move.target, move.target_step, move.target_strides),
            )
        )
        slots = _slots(move.slots)
        found = source[slots if isinstance(slots, slice) else indices.of(slots)]
        target[indices.of(move.blocks)] = found


def _strided(
    memory: torch.Tensor,
    move: Move,
    which: Int64Array,
    offset: int,
    step: int,
    strides: tuple[int, ...],
) -> torch.Tensor:
    """[slot or block, the pattern's axes], as a view of memory in units."""
    return memory.as_strided(
        (_reach(which), *move.shape),
        tuple(stride // move.unit_bytes for stride in (step, *strides)),
        # Counted from the start of the storage, of which this memory may be a part.
        memory.storage_offset() + offset // move.unit_bytes,
    )


def _reach(numbers: Int64Array) -> int:
    return int(numbers.max()) + 1


def _slots(slots: Int64Array) -> slice | Int64Array:
    """Slots that are evenly apart as a slice, which needs no copy of its own."""
    if slots.size == 1:
        return slice(int(slots[0]), int(slots[0]) + 1)
    step = int(slots[1] - slots[0])
    if step < 1 or (np.diff(slots) != step).any():
        return slots
    return slice(int(slots[0]), int(slots[-1]) + 1, step)


def _in_units(memory: torch.Tensor, unit: torch.dtype, unit_bytes: int) -> torch.Tensor:
    """The bytes as units, without a rest that fills none."""
    return memory[: memory.numel() // unit_bytes * unit_bytes].view(unit)
