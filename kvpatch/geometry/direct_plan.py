"""Turns segments of tokens into runs of bytes between two sets of planes.

All arrays: a segment costs a few array operations together with all others of its
length, and layers that are strided alike are planned once and shifted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from kvpatch.geometry.plane_copies import (
    Copy,
    CopyAxis,
    CopyStrides,
    check_reach,
    contiguous,
    copies_in_tiles,
    reach_of,
)
from kvpatch.geometry.segments import Int64Array, Segments

MOST_RUNS = 65_536
"""Of one plan of several: a millisecond of planning, and 1.5 MiB."""


@dataclass(frozen=True)
class Plan:
    """The byte runs to copy.

    No byte is written twice, provided that no two local planes share memory: layers that
    share a tensor have blocks of their own, so a plan each. Runs that touch on both
    sides are one, except across two layers, or across the keys and values of one where
    these lie further apart than blocks do: such neighbours can belong to two
    registrations.
    """

    remote_address: Int64Array
    local_address: Int64Array
    length: Int64Array

    def __len__(self) -> int:
        return int(self.length.size)

    def part(self, first: int, end: int) -> Plan:
        return Plan(
            self.remote_address[first:end], self.local_address[first:end], self.length[first:end]
        )


def plan_parts(
    parts: Iterable[tuple[Segments, Sequence[Copy]]], most_runs: int = MOST_RUNS
) -> Iterator[Plan]:
    """The runs of some copies, each of its own segments: plans that are made when asked for.

    All runs of a long prompt may be millions: the first can be on the wire while the others are
    still to be planned, and those that are not needed any more are not kept.

    Args:
        most_runs: of one plan, but for a layer or head that has more by itself.

    Raises:
        UnplannableCopy: a segment reaches outside a plane; before the first plan.
    """
    waiting: list[_Lot] = []
    runs = 0
    for group in _alike(parts):
        lot = _lot(*group)
        starts, of_each = lot.shape
        step = max(1, most_runs // of_each)
        for first in range(0, starts, step):
            some = lot.part(first, first + step)
            if waiting and runs + prod(some.shape) > most_runs:
                yield _written(waiting)
                waiting, runs = [], 0
            waiting.append(some)
            runs += prod(some.shape)
    if waiting:
        yield _written(waiting)


class _Lot(NamedTuple):
    """Runs of copies that are strided alike: planned once, the same from each address on."""

    remote_address: Int64Array
    local_address: Int64Array
    runs: Plan

    @property
    def shape(self) -> tuple[int, int]:
        """(addresses, runs from each)."""
        return self.remote_address.size, len(self.runs)

    def part(self, first: int, end: int) -> _Lot:
        return _Lot(self.remote_address[first:end], self.local_address[first:end], self.runs)


def _alike(
    parts: Iterable[tuple[Segments, Sequence[Copy]]],
) -> list[tuple[Segments, CopyStrides, list[Copy]]]:
    """Copies that are strided alike, of the same segments; all of them are checked."""
    found = []
    for segments, copies in parts:
        if not len(segments) or not copies:
            continue
        alike: dict[tuple[int, CopyStrides], tuple[Segments, list[Copy]]] = {}
        reach = reach_of(segments)
        for copy in copies:
            check_reach(reach, copy)
            for some, one in copies_in_tiles(segments, copy):
                alike.setdefault((id(some), one.strides), (some, []))[1].append(one)
        found += [(some, strides, group) for (_, strides), (some, group) in alike.items()]
    return found


def _lot(segments: Segments, strides: CopyStrides, copies: Sequence[Copy]) -> _Lot:
    # Axes that step over blocks here (heads of LHBNC, far values) are walked outside the segments,
    # so that neighbouring blocks are neighbours in the list of runs and merge.
    block = strides.block
    outside: list[CopyAxis] = []
    inside: list[CopyAxis] = []
    for axis in strides.inner:
        steps_over = block.size > 1 and axis.local_stride > block.local_stride
        (outside if steps_over else inside).append(axis)
    remote, local = _offsets(outside)
    return _Lot(
        _add(np.array([copy.remote_address for copy in copies], dtype=np.int64), remote),
        _add(np.array([copy.local_address for copy in copies], dtype=np.int64), local),
        _merged(_relative_runs(segments, strides, inside)),
    )


def _written(lots: Sequence[_Lot]) -> Plan:
    """The runs of all lots, each byte of them written once: they may be millions."""
    ends = np.cumsum([0, *(prod(lot.shape) for lot in lots)]).tolist()
    found = _unfilled(ends[-1])
    for lot, begin, end in zip(lots, ends, ends[1:], strict=False):
        part, runs = found.part(begin, end), lot.runs
        for whole, starts, own in (
            (part.remote_address, lot.remote_address, runs.remote_address),
            (part.local_address, lot.local_address, runs.local_address),
        ):
            np.add(starts[:, None], own, out=whole.reshape(lot.shape))
        part.length.reshape(lot.shape)[:] = runs.length
    return found


def _unfilled(runs: int) -> Plan:
    return Plan(*(np.empty(runs, dtype=np.int64) for _ in range(3)))


def _relative_runs(segments: Segments, strides: CopyStrides, inside: Sequence[CopyAxis]) -> Plan:
    """Runs of every segment, in the order of the segments, from address 0 on each side."""
    remote = (
        segments.remote_block * strides.block.remote_stride
        + segments.remote_offset * strides.token.remote_stride
    )
    local = (
        segments.local_block * strides.block.local_stride
        + segments.local_offset * strides.token.local_stride
    )
    lengths, kind = np.unique(segments.tokens, return_inverse=True)
    runs = []
    for tokens in lengths.tolist():  # as long as both sides are contiguous, then one per step
        length, left = contiguous(strides, tokens, inside)
        steps = _offsets(left)
        runs.append(Plan(*steps, np.full(steps[0].size, length, dtype=np.int64)))
    count = np.array([len(own) for own in runs], dtype=np.int64)[kind]
    end = np.cumsum(count)
    begin = end - count
    result = _unfilled(int(end[-1]))
    for number, own in enumerate(runs):
        chosen = np.flatnonzero(kind == number)
        place = _add(begin[chosen], np.arange(len(own), dtype=np.int64))
        result.remote_address[place] = _add(remote[chosen], own.remote_address)
        result.local_address[place] = _add(local[chosen], own.local_address)
        result.length[place] = np.tile(own.length, chosen.size)
    return result


def _offsets(axes: Sequence[CopyAxis]) -> tuple[Int64Array, Int64Array]:
    """(remote, local) byte offsets of every step of the axes, ascending on the local side."""
    remote = local = np.zeros(1, dtype=np.int64)
    for axis in sorted(axes, key=lambda axis: -axis.local_stride):
        step = np.arange(axis.size, dtype=np.int64)
        remote = _add(remote, step * axis.remote_stride)
        local = _add(local, step * axis.local_stride)
    return remote, local


def _add(outer: Int64Array, inner: Int64Array) -> Int64Array:
    """Every sum of the two, the second running faster."""
    return (outer[:, None] + inner).reshape(-1)


def _merged(runs: Plan) -> Plan:
    """Neighbours in the list that touch on both sides, as one run."""
    remote, local, length = runs.remote_address, runs.local_address, runs.length
    ahead = length[:-1]
    is_apart = (local[:-1] + ahead != local[1:]) | (remote[:-1] + ahead != remote[1:])
    first = np.flatnonzero(np.append(True, is_apart))
    return Plan(remote[first], local[first], np.add.reduceat(length, first))
