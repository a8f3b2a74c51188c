"""Placements of one chunk that differ in their addresses alone, as one strided copy.

Layers of one shape lie evenly apart in a chunk's buffer, and most often in the engine's memory
too: an allocator asks for equal sizes in a row, and keys and values of a layer are halves of one
tensor. What a copy costs a device is its launch, so that a prompt of 80 layers is placed in a few
and not in hundreds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvpatch.geometry.plane_copies import CopyAxis
from kvpatch.geometry.segments import Int64Array
from kvpatch.geometry.staged_plan import Placement


def merged(placements: Sequence[Placement]) -> list[Placement]:
    """The same copies by as few placements as there are even distances.

    Each has the address of its first layer; the others are inner axes of its strides. No two
    placements of a chunk write to the same byte, so that their order does not matter.
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
    while first < len(ordered):
        axes = _axes(places[first:])
        count = 1
        for axis in axes:
            count *= axis.size
        one = ordered[first]
        yield replace(one, strides=one.strides._replace(inner=(*one.strides.inner, *axes)))
        first += count


def _axes(places: Int64Array) -> tuple[CopyAxis, ...]:
    """One or two axes that walk through as many of the first places as any two do; or none.

    Args:
        places: [placement, (offset in the buffer, address)], by address.
    """
    steps = np.diff(places, axis=0)
    if not len(steps) or (steps[0] <= 0).any():  # torch's strides are never negative
        return ()
    other = np.flatnonzero((steps != steps[0]).any(axis=1))
    inner = int(other[0]) + 1 if len(other) else len(places)
    within = CopyAxis(inner, *(int(step) for step in steps[0]))
    if 2 * inner > len(places):
        return (within,)
    apart = places[inner] - places[0]
    if (apart <= 0).any():
        return (within,)
    rows = len(places) // inner
    even = places[0] + (
        np.arange(rows)[:, None, None] * apart + np.arange(inner)[None, :, None] * steps[0]
    )
    matches = (places[: rows * inner].reshape(rows, inner, 2) == even).all(axis=(1, 2))
    rows = int(np.argmin(matches)) if not matches.all() else rows
    return (within, CopyAxis(rows, *(int(step) for step in apart))) if rows > 1 else (within,)
