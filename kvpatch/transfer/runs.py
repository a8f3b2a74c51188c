"""Host blocks that follow one another, which one call can fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvpatch.geometry.segments import Int64Array


class Run(NamedTuple):
    """Host blocks that follow one another, and where their blocks are in the list of blocks."""

    host_block: int
    first: int
    length: int


def runs_of(host_blocks: Int64Array, blocks: Int64Array | None = None) -> tuple[Run, ...]:
    """Host blocks in ascending order, as runs.

    Args:
        blocks: of the host blocks; where they are given they follow one another too.
    """
    is_broken = np.diff(host_blocks) != 1
    if blocks is not None:
        is_broken |= np.diff(blocks) != 1
    starts = np.concatenate(([0], np.flatnonzero(is_broken) + 1, [host_blocks.size]))
    return tuple(
        Run(int(host_blocks[first]), first, end - first)
        for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    )


def within(runs: Sequence[Run], start: int, count: int, *, split: bool) -> Iterator[Run]:
    """What of the runs is in a part of the list.

    Args:
        split: into single host blocks, where they are not in one piece.
    """
    for run in runs:
        first = max(run.first, start)
        end = min(run.first + run.length, start + count)
        if end <= first:
            continue
        host_block = run.host_block + first - run.first
        if split:
            yield from (Run(host_block + i, first + i, 1) for i in range(end - first))
        else:
            yield Run(host_block, first, end - first)
