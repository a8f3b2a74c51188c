"""Placements of one chunk that differ in their addresses alone, as one strided copy.

Layers of one shape lie evenly apart in a chunk's buffer, and most often in the engine's memory
too: an allocator asks for equal sizes in a row, and keys and values of a layer are halves of one
tensor. What a copy costs a device is its launch, so that a prompt of 80 layers is placed in a few
and not in hundreds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from kvpatch.geometry.plane_copies import CopyAxis
from kvpatch.geometry.segments import Int64Array
from kvpatch.geometry.staged_plan import Placement


def merged(placements: Sequence[Placement]) -> list[Placement]:
    """The same copies by as few placements as there are even distances.

    Each has the address of its first layer, and axes for the others. No two placements of a chunk
    write to the same byte, so that their order does not matter.
    """
    alike: dict[Hashable, list[Placement]] = {}
    for placement in placements:
        alike.setdefault((id(placement.segments), placement.strides), []).append(placement)
    return [one for group in alike.values() for one in _merged(group)]


def _merged(group: Sequence[Placement]) -> Iterator[Placement]:
    if len(group) == 1:
        yield group[0]
        return
    ordered = sorted(group, key=lambda placement: placement.local_address)
    places = np.array([(one.staging_offset, one.local_address) for one in ordered])
    first = 0
    for axes in _walks(places):
        yield replace(ordered[first], layers=axes)
        first += prod(axis.size for axis in axes)


def _walks(places: Int64Array) -> Iterator[tuple[CopyAxis, ...]]:
    """Axes that walk through all places one after the other: a grid first, then even runs.

    Args:
        places: [placement, (offset in the buffer, address)], by address.
    """
    axes = _grid(places)
    if axes:
        yield axes
    first = prod(axis.size for axis in axes) if axes else 0
    left = places[first:]
    steps = np.diff(left, axis=0)
    # Where the distance to the next place is another than the one before.
    turns = 1 + np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1))
    at = 0
    while at < len(left):
        turn = int(np.searchsorted(turns, at, side="right"))
        last = int(turns[turn]) if turn < len(turns) else len(left) - 1
        if last <= at or (steps[at] <= 0).any():  # torch's strides are never negative
            yield ()
            at += 1
        else:
            yield (CopyAxis(last + 1 - at, *steps[at].tolist()),)
            at = last + 1


def _grid(places: Int64Array) -> tuple[CopyAxis, ...]:
    """Two axes that walk through the first places, as many as a whole number of rows; or none.

    As keys and values of each layer do.
    """
    steps = np.diff(places, axis=0)
    other = np.flatnonzero((steps != steps[:1]).any(axis=1))
    if not len(other):
        return ()
    inner = int(other[0]) + 1
    rows = len(places) // inner
    apart = places[inner] - places[0]
    if inner == 1 or rows < 2 or (steps[0] <= 0).any() or (apart <= 0).any():
        return ()
    even = places[0] + (
        np.arange(rows)[:, None, None] * apart + np.arange(inner)[None, :, None] * steps[0]
    )
    matches = (places[: rows * inner].reshape(rows, inner, 2) == even).all(axis=(1, 2))
    rows = rows if matches.all() else int(np.argmin(matches))
    if rows < 2:
        return ()
    return CopyAxis(rows, *apart.tolist()), CopyAxis(inner, *steps[0].tolist())
