"""Copies of blocks into host blocks where both are in host memory.

numpy lets go of the interpreter while it copies, so that threads share the rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpatch.geometry.segments import Int64Array
from kvpatch.transfer.cores import use_all_cores
from kvpatch.transfer.host_block_rows import Sheet, StorageCopy, unit_bytes
from kvpatch.transfer.runs import Run, runs_of

#: What is worth threads; two or three fill what memory can take.
_LONG_BYTES = 4 * 1024**2
_MOST_THREADS = 4
#: Host blocks that follow one another and are worth a call of their own.
_LONG_RUN = 4
#: A row that is worth a call of its own.
_LONG_ROW_BYTES = 16 * 1024
#: What is copied twice while it is in a core's cache.
_CACHED_BYTES = 256 * 1024


class HostCopies:
    """Copies out of host memory, which are done when they return.

    Args:
        copies: every storage's.
        host_block_bytes: of one host block over all of them.
    """

    def __init__(self, copies: Sequence[StorageCopy], host_block_bytes: int) -> None:
        self._copies = copies
        self._host_block_bytes = host_block_bytes
        self._threads: ThreadPoolExecutor | None = None

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks into host blocks."""
        order = np.argsort(np.asarray(host_blocks, dtype=np.int64))
        into = np.asarray(host_blocks, dtype=np.int64)[order]
        of = np.asarray(blocks, dtype=np.int64)[order]
        together = runs_of(into, of)
        if len(of) >= _LONG_RUN * len(together):
            copy = partial(copy_runs, of=of, runs=together)
        else:
            copy = partial(copy_rows, of=of, host_blocks=into, runs=runs_of(into))
        ends = int(of.max()) + 1, int(into[-1]) + 1
        tasks = [
            partial(copy, *views(storage, sheet, row, *ends))
            for storage in self._copies
            for sheet in storage.sheets
            for row in range(sheet.count)
        ]
        if self._threads is None and len(of) * self._host_block_bytes >= _LONG_BYTES:
            self._threads = ThreadPoolExecutor(
                _most_threads(), "kvpatch-host-pool", initializer=use_all_cores
            )
        if self._threads is None:
            for task in tasks:
                task()
        else:
            for done in [self._threads.submit(task) for task in tasks]:
                done.result()

    def settle(self) -> None:
        """All is done already."""


def views(
    storage: StorageCopy, sheet: Sheet, row: int, blocks: int, host_blocks: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """One of a sheet's rows, of so many blocks and host blocks: [block or host block, units]."""
    unit = unit_bytes(storage.source, storage.host, sheet)
    kind, strides = np.dtype(f"u{unit}"), (sheet.step_bytes, unit)
    width = sheet.row_bytes // unit
    source = sheet.source + row * sheet.source_apart
    target = sheet.target + row * sheet.target_apart
    return (
        np.ndarray((blocks, width), kind, storage.source.numpy(), source, strides),
        np.ndarray((host_blocks, width), kind, storage.host.numpy(), target, strides),
    )


def copy_runs(
    rows: npt.NDArray[Any], into: npt.NDArray[Any], of: Int64Array, runs: Sequence[Run]
) -> None:
    """Rows of blocks that follow one another, into host blocks that do."""
    for host_block, first, length in runs:
        block = int(of[first])
        into[host_block : host_block + length] = rows[block : block + length]


def copy_rows(
    rows: npt.NDArray[Any],
    into: npt.NDArray[Any],
    of: Int64Array,
    host_blocks: Int64Array,
    runs: Sequence[Run],
) -> None:
    """Rows of blocks anywhere; in one pass over memory, but for short rows that are scattered.

    Args:
        of, host_blocks, runs: blocks, and their host blocks in ascending order.
    """
    row_bytes = rows.shape[1] * rows.itemsize
    # take would make a copy of all rows first where there are gaps between them.
    if rows.flags.c_contiguous and len(of) >= _LONG_RUN * len(runs):
        for host_block, first, length in runs:
            # Every number is in range; clip alone writes to `out` without a copy of it.
            numbers = of[first : first + length]
            np.take(rows, numbers, axis=0, out=into[host_block : host_block + length], mode="clip")
        return
    if row_bytes >= _LONG_ROW_BYTES:
        for host_block, number in zip(host_blocks.tolist(), of.tolist(), strict=True):
            into[host_block] = rows[number]
        return
    at_once = max(1, _CACHED_BYTES // row_bytes)
    for start in range(0, len(of), at_once):
        part = slice(start, start + at_once)
        into[host_blocks[part]] = rows[of[part]]


def _most_threads() -> int:
    """No more than the model itself has."""
    import torch

    return max(1, min(_MOST_THREADS, int(torch.get_num_threads())))
