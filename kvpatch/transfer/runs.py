"""Slots that follow one another, which one call can fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Slots that follow one another, and where their blocks are in the list of blocks."""

    slot: int
    first: int
    length: int


def runs_of(slots: Int64Array, blocks: Int64Array | None = None) -> tuple[Run, ...]:
    """Slots in ascending order, as runs.

    Args:
        blocks: of the slots; where they are given they follow one another too.
    """
    is_broken = np.diff(slots) != 1
    if blocks is not None:
        is_broken |= np.diff(blocks) != 1
    starts = np.concatenate(([0], np.flatnonzero(is_broken) + 1, [slots.size]))
    return tuple(
        Run(int(slots[first]), first, end - first)
        for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    )


def within(runs: Sequence[Run], start: int, count: int, *, split: bool) -> Iterator[Run]:
    """What of the runs is in a part of the list.

    Args:
        split: into single slots, where they are not in one piece.
    """
    for run in runs:
        first = max(run.first, start)
        end = min(run.first + run.length, start + count)
        if end <= first:
            continue
        slot = run.slot + first - run.first
        if split:
            yield from (Run(slot + i, first + i, 1) for i in range(end - first))
        else:
            yield Run(slot, first, end - first)
