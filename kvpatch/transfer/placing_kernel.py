"""Places what has landed in a staging buffer on a GPU: one launch for all moves of a chunk.

A Triton kernel, for GPUs where Triton runs. A move is a strided copy in several axes, and the
kernel gets all of them as one table. Each program copies :data:`_TILE_UNITS` units of one move, and
works out of the table where they lie on both sides.
:func:`kvpatch.transfer.place.place_on_device` does the same by indexing, in several launches for
each move. It is what this is compared with, and what devices without Triton use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane_copies import CopyAxis, CopyStrides
from kvpatch.geometry.segments import BlockList, Int64Array, Numbers, pair_blocks
from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer.kernel_thread import is_ready, noise_on
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.place import Move, Side, moves_of, place_on_device
from kvpatch.transfer.plane_bytes import uploaded

#: That one program copies: with 16 bytes each, 16 KiB.
_TILE_UNITS = 1024
#: The kernel counts a move's units in 32 bits: a division of 64 bits takes a GPU many steps.
_MOST_UNITS = 2**31 - _TILE_UNITS


class _Axis(NamedTuple):
    """One axis of a move: on each side, bytes or block numbers from one item to the next."""

    size: int = 1
    source_bytes: int = 0
    source_numbers: int = 0
    target_bytes: int = 0
    target_numbers: int = 0


class _Row(NamedTuple):
    """A move as the kernel gets it; its axes come behind it.

    Attributes:
        first_tile: the number of the first program that copies it.
        units: of the whole move.
        run_units: of a run, contiguous on both sides.
        source, target: address of the pattern in block 0.
        source_step, target_step: bytes from block to block.
        source_numbers, target_numbers: where the block numbers begin in the table.
    """

    first_tile: int
    units: int
    run_units: int
    source: int
    target: int
    source_step: int
    target_step: int
    source_numbers: int
    target_numbers: int


#: That one thread copies at once.
_WIDEST_BYTES = 16
#: By bytes of a unit: one of these, or two.
_ITEMS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}


def place_by_kernel(
    staging: torch.Tensor,
    into: Sequence[tuple[Bytes, Placement]],
    may_run: Callable[[Hashable, Callable[[], object]], bool] = lambda *_: True,
) -> bool:
    """Does :func:`kvpatch.transfer.place.place_on_device` in one launch, in the current stream.

    Args:
        staging: ``uint8``, one-dimensional.
        into: each placement with the memory that it is in.
        may_run: asked with what Triton compiles for, and a call that compiles alone; where it is
            False nothing is done, and this is too.

    Raises:
        UnplannableCopy: a move has more units than the kernel can count.
    """
    moves = [
        (cache.memory.data_ptr(), move)
        for cache, placement in into
        for move in moves_of(placement, cache.address)
    ]
    if not moves:
        return True
    landed = staging.data_ptr()
    unit_bytes = gcd(_WIDEST_BYTES, landed, *chain(*(_distances(*move) for move in moves)))
    axes = [_axes_of(move) for _, move in moves]
    axis_count = max(map(len, axes))
    width = len(_Row._fields) + axis_count * len(_Axis._fields)
    numbers = _BlockNumbers(len(moves) * width)
    rows: list[list[int]] = []
    tiles: list[int] = []  # of each move
    tile_count = 0
    for (address, move), found in zip(moves, axes, strict=True):
        run_units = move.run_bytes // unit_bytes
        units = run_units * prod(axis.size for axis in found)
        if units > _MOST_UNITS:
            raise UnplannableCopy(
                f"expected at most {_MOST_UNITS} units in one copy, found {units} of {unit_bytes} "
                "bytes"
            )
        row = _Row(
            tile_count,
            units,
            run_units,
            landed + move.source.offset,
            address + move.target.offset,
            move.source.step,
            move.target.step,
            numbers.start_of(move.source.numbers),
            numbers.start_of(move.target.numbers),
        )
        tiles.append(-(-units // _TILE_UNITS))
        tile_count += tiles[-1]
        rows.append([*row, *(number for axis in found for number in axis)])
        rows[-1] += [*_Axis()] * (axis_count - len(found))
    parts = np.array(rows), *numbers.arrays, np.repeat(np.arange(len(rows)), tiles)
    whole = np.concatenate([part.reshape(-1) for part in parts])
    (table,) = uploaded([whole], staging.device)
    item = _ITEMS[unit_bytes]
    constants = {"ITEM": item, "ITEMS": unit_bytes * 8 // item.primitive_bitwidth}
    constants |= {"AXES": axis_count, "TILE": _TILE_UNITS}
    arguments = table, whole.size - tile_count
    compile_alone = partial(_copy[(0,)], *arguments, **constants)
    is_there = may_run(("placing", unit_bytes, axis_count), compile_alone)
    if is_there:
        _copy[(tile_count,)](*arguments, **constants)
    return is_there


def place_surely(staging: torch.Tensor, into: Sequence[tuple[Bytes, Placement]]) -> None:
    """Does :func:`place_by_kernel`, or indexes until the kernel has been tried and compiled."""
    device = staging.device
    may_run = partial(is_ready, device)
    is_tried = may_run("placing", partial(is_right_on, device))
    if not (is_tried and place_by_kernel(staging, into, may_run)):
        place_on_device(staging, into)


def is_right_on(device: torch.device, items: Sequence[int] = (2, 4, 8)) -> bool:
    """Returns True if the kernel places on a device what indexing places there.

    It is tried on a small copy of every kind: two layers, tokens before heads into heads
    before tokens, blocks of 6 tokens into blocks of 4; in units of 4, 8 and 16 bytes,
    which are the most that two heads of an item have in common.
    """
    blocks = BlockList(np.array([2, 0, 1, 3]), 6), BlockList(np.array([5, 1, 0, 4, 2]), 4)
    segments = pair_blocks(*blocks, 1, 20)
    for item in items:
        block, token = CopyAxis(4, 48 * item, 32 * item), CopyAxis(6, 8 * item, 2 * item)
        inner = CopyAxis(2, item, item), CopyAxis(4, 2 * item, 8 * item)
        strides = CopyStrides(item, block, token, inner)
        staging = noise_on(device, 2 * 4 * 48 * item)
        found, expected = torch.zeros(2, 2 * 6 * 32 * item, dtype=torch.uint8, device=device)
        for place, memory in ((place_by_kernel, found), (place_on_device, expected)):
            address = memory.data_ptr()
            into = Bytes(address, memory)
            layers = ((0, address), (4 * 48 * item, address + 6 * 32 * item))
            place(staging, [(into, Placement("", *at, strides, segments)) for at in layers])
        if not torch.equal(found, expected):
            return False
    return True


class _BlockNumbers:
    """The block numbers of a chunk's moves, each array of them once.

    Args:
        start: the place of the first one in the table.
    """

    def __init__(self, start: int) -> None:
        self._end = start
        self._starts: dict[int, int] = {}
        self.arrays: list[Int64Array] = []

    def start_of(self, numbers: Numbers) -> int:
        """Returns where the first of these numbers is in the table."""
        start = self._starts.setdefault(id(numbers), self._end)
        if start == self._end:
            self.arrays.append(numbers.ids)
            self._end += numbers.ids.size
        return start


def _distances(address: int, move: Move) -> Iterator[int]:
    """Yields what all places of a move are sums of, and its runs' length."""
    yield from (address, move.run_bytes)
    for side in (move.source, move.target):
        yield from (side.offset, side.step, *side.strides)


def _axes_of(move: Move) -> list[_Axis]:
    """Returns the axes of a move, the innermost first, without those of one item."""
    sides = zip(_strides_of(move.source), _strides_of(move.target), strict=True)
    found = [_Axis(size, *source, *target) for (size, *source), (_, *target) in sides if size != 1]
    return found[::-1]


def _strides_of(side: Side) -> Iterator[tuple[int, int, int]]:
    """Yields (size, bytes, block numbers) of each axis: of blocks, and the pattern."""
    shape = side.numbers.ids.shape
    for axis, size in enumerate(shape):
        yield size, 0, prod(shape[axis + 1 :])
    for size, stride in zip(side.shape, side.strides, strict=True):
        yield size, stride, 0


# Else Triton compiles another kernel where the table's size is a multiple of 16, in a request.
@triton.jit(do_not_specialize=["tiles_at"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    table,
    tiles_at,
    ITEM: tl.constexpr,  # noqa: N803
    ITEMS: tl.constexpr,  # noqa: N803
    AXES: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Copies one tile of one move. The order of a row's numbers is that of `_Row` and `_Axis`."""
    program = tl.program_id(0)
    row = table + tl.load(table + tiles_at + program) * (9 + 5 * AXES)
    first_unit = (program - tl.load(row)).to(tl.int32) * TILE
    unit = first_unit + tl.arange(0, TILE)
    is_inside = unit < tl.load(row + 1).to(tl.int32)
    run_units = tl.load(row + 2).to(tl.int32)
    rest = unit // run_units
    source = (unit - rest * run_units).to(tl.int64) * (ITEM.primitive_bitwidth // 8 * ITEMS)
    target = source
    source_number = tl.full((TILE,), 0, tl.int64)
    target_number = tl.full((TILE,), 0, tl.int64)
    for number in tl.static_range(AXES):
        axis = row + 9 + 5 * number
        size = tl.load(axis).to(tl.int32)
        above = rest // size
        at = (rest - above * size).to(tl.int64)
        rest = above
        source += at * tl.load(axis + 1)
        source_number += at * tl.load(axis + 2)
        target += at * tl.load(axis + 3)
        target_number += at * tl.load(axis + 4)
    source_block = tl.load(table + tl.load(row + 7) + source_number, mask=is_inside, other=0)
    target_block = tl.load(table + tl.load(row + 8) + target_number, mask=is_inside, other=0)
    source += tl.load(row + 3) + source_block * tl.load(row + 5)
    target += tl.load(row + 4) + target_block * tl.load(row + 6)
    # One access for all items of a unit: Triton has to know that they are aligned.
    pointer: tl.constexpr = tl.pointer_type(ITEM)
    unit_bytes: tl.constexpr = ITEM.primitive_bitwidth // 8 * ITEMS
    item = tl.arange(0, ITEMS)[None, :]
    source = tl.multiple_of(source.to(pointer), unit_bytes)[:, None] + item
    target = tl.multiple_of(target.to(pointer), unit_bytes)[:, None] + item
    found = tl.load(source, mask=is_inside[:, None])
    tl.store(target, found, mask=is_inside[:, None])
