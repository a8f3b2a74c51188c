"""Places what has landed in a staging buffer: strided copies in local memory.

One copy for every kind of segments (same offsets, same length) of a placement, over
all of its blocks and layers at once: numpy for host memory, where it is about twice as fast as
torch, and torch for everything else. On the host a run that is contiguous on both sides
is one item of the copy, however long: numpy then moves it in one piece, which is 1.1 (256
bytes) to 1.8 times (32) as fast as 8 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpatch.geometry.plane_copies import CopyStrides, contiguous
from kvpatch.geometry.segments import Numbers
from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.plane_bytes import integers_of

if TYPE_CHECKING:
    import torch

_WIDEST_BYTES = 8
_KNOWN_PATTERNS = 1024


class Side(NamedTuple):
    """One end of a move.

    Attributes:
        offset: of the first staged or local block's pattern, in bytes.
        step: bytes from one such block to the next.
        shape, strides: of the pattern, runs apart; bytes.
    """

    offset: int
    step: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    numbers: Numbers


class Move(NamedTuple):
    """One strided copy: for every pair of a staged and a local block, the same pattern of runs.

    Attributes:
        run_bytes: contiguous on both sides.
        unit_bytes: the widest of 1, 2, 4 or 8 that all offsets and strides are whole numbers of.
    """

    run_bytes: int
    unit_bytes: int
    source: Side
    target: Side


def moves_of(placement: Placement, cache_address: int) -> Iterator[Move]:
    """The strided copies of one placement into a cache that starts at ``cache_address``."""
    strides = placement.strides
    theirs, ours = strides.token.remote_stride, strides.token.local_stride
    for kind in placement.segments.kinds:
        run, unit, shape, source_strides, target_strides = _pattern(strides, kind.tokens)
        source = placement.staging_offset + kind.remote_offset * theirs
        target = placement.local_address - cache_address + kind.local_offset * ours
        parts = (kind.parts,) if kind.parts > 1 else ()
        # Parts are an axis of the pattern on the side where they share a block.
        of = parts if kind.remote.ids.ndim == 1 else ()
        into = parts if kind.local.ids.ndim == 1 else ()
        apart = (kind.remote_step * theirs,), (kind.local_step * ours,)
        yield Move(
            run,
            gcd(unit, source, target, *apart[0], *apart[1]),
            Side(
                source,
                strides.block.remote_stride,
                of + shape,
                (apart[0] if of else ()) + source_strides,
                kind.remote,
            ),
            Side(
                target,
                strides.block.local_stride,
                into + shape,
                (apart[1] if into else ()) + target_strides,
                kind.local,
            ),
        )


@lru_cache(_KNOWN_PATTERNS)
def _pattern(
    strides: CopyStrides, tokens: int
) -> tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(run, unit, shape, strides in the buffer, strides in the cache) of a segment."""
    run, axes = contiguous(strides, tokens)
    axes.sort(key=lambda axis: -axis.local_stride)
    numbers = [run, strides.block.remote_stride, strides.block.local_stride]
    numbers += [number for axis in axes for number in axis[1:]]
    return (
        run,
        gcd(_WIDEST_BYTES, *numbers),
        tuple(axis.size for axis in axes),
        tuple(axis.remote_stride for axis in axes),
        tuple(axis.local_stride for axis in axes),
    )


def place_in_host_memory(
    staging: npt.NDArray[np.uint8],
    cache: npt.NDArray[np.uint8],
    cache_address: int,
    placement: Placement,
) -> None:
    """Copies one placement's bytes from a chunk's buffer into a cache.

    Args:
        staging: the buffer's bytes, one-dimensional.
        cache: all bytes of the cache's allocation, one-dimensional and writable.
    """
    for move in moves_of(placement, cache_address):
        item = _item(move.run_bytes, move.unit_bytes)
        found = _view(staging, item, move.source)
        if move.source.numbers.steps is None:
            found = found[move.source.numbers.ids]
        _rows(cache, item, move.target)[move.target.numbers.ids] = found


@lru_cache(_KNOWN_PATTERNS)
def _item(run_bytes: int, unit_bytes: int) -> np.dtype[Any]:
    """What numpy moves at once: a number where it has one of that width, else opaque bytes."""
    return np.dtype(f"u{run_bytes}" if run_bytes == unit_bytes else f"V{run_bytes}")


def _view(memory: npt.NDArray[np.uint8], item: np.dtype[Any], side: Side) -> npt.NDArray[Any]:
    """The lots of a side, where they are evenly apart; else all its rows."""
    steps = side.numbers.steps
    if steps is None:
        return _rows(memory, item, side)
    first = int(side.numbers.ids.flat[0])
    found: npt.NDArray[Any] = np.ndarray(
        side.numbers.ids.shape + side.shape,
        item,
        memory.data,
        side.offset + first * side.step,
        (*(step * side.step for step in steps), *side.strides),
    )
    return found


def _rows(memory: npt.NDArray[np.uint8], item: np.dtype[Any], side: Side) -> npt.NDArray[Any]:
    """[staged or local block, the pattern's axes] of memory, up to the last that is asked for."""
    shape = (side.numbers.end, *side.shape)
    strides = (side.step, *side.strides)
    found: npt.NDArray[Any] = np.ndarray(shape, item, memory.data, side.offset, strides)
    return found


def place_on_device(staging: torch.Tensor, into: Sequence[tuple[Bytes, Placement]]) -> None:
    """As :func:`place_in_host_memory`, on the device of both, in its current stream.

    Args:
        staging: ``uint8``, one-dimensional.
        into: each placement with the memory that it is in.
    """
    moves = [(cache, move) for cache, one in into for move in moves_of(one, cache.address)]
    numbers = [move.target.numbers for _, move in moves]
    numbers += [move.source.numbers for _, move in moves if move.source.numbers.steps is None]
    indices = _uploaded(numbers, staging.device)
    for (_, cache), move in moves:
        source, target = move.source, move.target
        steps = source.numbers.steps
        if steps is None:
            found = _strided(staging, move, source, (source.numbers.end,), (source.step,))
            found = found[indices[id(source.numbers)]]
        else:
            offset = source.offset + int(source.numbers.ids.flat[0]) * source.step
            apart = tuple(step * source.step for step in steps)
            lots = source.numbers.ids.shape
            found = _strided(staging, move, source._replace(offset=offset), lots, apart)
        rows = _strided(cache, move, target, (target.numbers.end,), (target.step,))
        rows[indices[id(target.numbers)]] = found


def _uploaded(numbers: Sequence[Numbers], device: torch.device) -> dict[int, torch.Tensor]:
    """Block numbers on a device by the id of who holds them, in one copy.

    From pinned memory: a stream that waits for the model must not make this thread wait.
    """
    import torch

    distinct = list({id(one): one for one in numbers}.values())
    flat = torch.from_numpy(np.concatenate([one.ids.reshape(-1) for one in distinct]))
    if device.type != "cpu" and torch.accelerator.is_available():
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([one.ids.size for one in distinct])
    return {id(one): part.view(one.ids.shape) for one, part in zip(distinct, parts, strict=True)}


def _strided(
    memory: torch.Tensor,
    move: Move,
    side: Side,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """[staged or local blocks, the pattern's axes, units of a run], as a view in units."""
    unit = move.unit_bytes
    return _in_units(memory, unit).as_strided(
        (*shape, *side.shape, move.run_bytes // unit),
        (*(stride // unit for stride in (*strides, *side.strides)), 1),
        # Counted from the start of the storage, of which this memory may be a part.
        (memory.storage_offset() + side.offset) // unit,
    )


def _in_units(memory: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """The bytes as units, without a rest that fills none."""
    whole = memory[: memory.numel() // unit_bytes * unit_bytes]
    return whole.view(integers_of(unit_bytes))
