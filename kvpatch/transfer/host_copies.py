"""Copies of blocks into slots where both are in host memory.

numpy lets go of the interpreter while it copies, so that threads share the rows of a step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpatch.transfer.runs import Run, runs_of
from kvpatch.transfer.slot_rows import Sheet, StorageCopy, unit_bytes

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.host_buffer")

#: What is worth threads; two or three fill what memory can take.
_LONG_BYTES = 4 * 1024**2
_MOST_THREADS = 4
#: Slots that follow one another and are worth a call of their own.
_LONG_RUN = 4
#: A row that is worth a call of its own.
_LONG_ROW_BYTES = 16 * 1024
#: What is copied twice while it is in a core's cache.
_CACHED_BYTES = 256 * 1024
_TASKS = Path("/proc/self/task")


class HostCopies:
    """Copies out of host memory, which are done when they return.

    Args:
        copies: every storage's.
        slot_bytes: of one slot over all of them.
    """

    def __init__(self, copies: Sequence[StorageCopy], slot_bytes: int) -> None:
        self._copies = copies
        self._slot_bytes = slot_bytes
        self._threads: ThreadPoolExecutor | None = None

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks into slots."""
        order = np.argsort(np.asarray(slots, dtype=np.int64))
        into = np.asarray(slots, dtype=np.int64)[order]
        of = np.asarray(blocks, dtype=np.int64)[order]
        runs = tuple(runs_of(into))
        tasks = [
            partial(copy_row, copy.source, copy.host, sheet, row, of, into, runs)
            for copy in self._copies
            for sheet in copy.sheets
            for row in range(sheet.count)
        ]
        if self._threads is None and len(of) * self._slot_bytes >= _LONG_BYTES:
            self._threads = ThreadPoolExecutor(
                _most_threads(), "kvpatch-host-pool", initializer=_use_all_cores
            )
        if self._threads is None:
            for task in tasks:
                task()
        else:
            for done in [self._threads.submit(task) for task in tasks]:
                done.result()

    def settle(self) -> None:
        """All is done already."""


def copy_row(
    source: torch.Tensor,
    host: torch.Tensor,
    sheet: Sheet,
    row: int,
    of: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    runs: Sequence[Run],
) -> None:
    """One of a sheet's rows, of all blocks; in one pass over memory but for short scattered rows.

    Args:
        of, slots, runs: blocks, and their slots in ascending order.
    """
    unit = unit_bytes(source, host, sheet)
    kind, strides = np.dtype(f"u{unit}"), (sheet.step_bytes, unit)
    rows, into = (
        np.ndarray((count, sheet.row_bytes // unit), kind, memory.numpy(), offset, strides)
        for memory, count, offset in (
            (source, int(of.max()) + 1, sheet.source + row * sheet.source_apart),
            (host, int(slots[-1]) + 1, sheet.target + row * sheet.target_apart),
        )
    )
    # take would make a copy of all rows first where there are gaps between them.
    if sheet.step_bytes == sheet.row_bytes and len(of) >= _LONG_RUN * len(runs):
        for slot, first, length in runs:
            # Every number is in range; clip alone writes to `out` without a copy of it.
            numbers = of[first : first + length]
            np.take(rows, numbers, axis=0, out=into[slot : slot + length], mode="clip")
        return
    if sheet.row_bytes >= _LONG_ROW_BYTES:
        for slot, number in zip(slots.tolist(), of.tolist(), strict=True):
            into[slot] = rows[number]
        return
    at_once = max(1, _CACHED_BYTES // sheet.row_bytes)
    for start in range(0, len(of), at_once):
        part = slice(start, start + at_once)
        into[slots[part]] = rows[of[part]]


def _most_threads() -> int:
    """No more than the model itself has."""
    import torch

    return max(1, min(_MOST_THREADS, int(torch.get_num_threads())))


def _use_all_cores() -> None:
    """Lets this thread run where any thread of the process may.

    A thread starts on the cores of the one that made it, and on a CPU the connector keeps a
    worker's first thread on one core, which it sets aside for transfers.
    """
    if not _TASKS.is_dir() or not hasattr(os, "sched_setaffinity"):
        return
    cores: set[int] = set()
    for task in _TASKS.iterdir():
        try:
            cores |= os.sched_getaffinity(int(task.name))
        except ProcessLookupError:  # it has ended meanwhile
            continue
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        _LOG.debug("copies stay on the cores of the thread that asks for them: %s", error)
