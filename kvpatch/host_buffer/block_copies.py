"""Copies of blocks into host blocks by torch: one gather, then its rows.

On a device with streams in one of their own, so that the model goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpatch.geometry.segments import Int64Array
from kvpatch.host_buffer.host_block_rows import Sheet, StorageCopy, unit_bytes
from kvpatch.transfer.one_memory import streams_of
from kvpatch.transfer.plane_bytes import integers_of, uploaded

if TYPE_CHECKING:
    import torch

#: Of the device's memory at once, for blocks on their way.
_GATHERED_BYTES = 32 * 1024**2


class BlockCopies:
    """Copies whole blocks. On a device with streams they are there after :meth:`settle`.

    Args:
        copies: every storage's.
        device: of the blocks.
        blocks, host_blocks: how many there are of each.
    """

    def __init__(
        self, copies: Sequence[StorageCopy], device: torch.device, blocks: int, host_blocks: int
    ) -> None:
        self._copies = copies
        self._device = device
        self._blocks = blocks
        self._host_blocks = host_blocks
        self._streams = streams_of(device)
        self._stream: Any = None
        self._event: Any = None

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks into host blocks, after all that the device was told."""
        import torch

        into = np.asarray(host_blocks, dtype=np.int64)
        order = np.argsort(into)
        of, into = np.asarray(blocks, dtype=np.int64)[order], into[order]
        if self._streams is None:
            self._copy(torch.from_numpy(of).to(self._device), into)
            return
        if self._stream is None:
            self._stream = self._streams.Stream(device=self._device)
        current = self._streams.current_stream(self._device)
        with self._streams.stream(self._stream):
            (indices,) = uploaded([of], self._device)
            self._stream.wait_stream(current)
            self._copy(indices, into)
            self._event = self._streams.Event()
            self._event.record(self._stream)

    def settle(self) -> None:
        """Waits until all that was saved is in host memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def _copy(self, indices: torch.Tensor, host_blocks: Int64Array) -> None:
        """Gathers a sheet's rows, as many blocks at once as take little of the device's memory."""
        for source, host, sheets in self._copies:
            for sheet in sheets:
                unit = unit_bytes(source, host, sheet)
                places = (sheet.source, sheet.source_apart), (sheet.target, sheet.target_apart)
                rows = _sheet_view(source, sheet, self._blocks, *places[0], unit)
                into = _sheet_view(host, sheet, self._host_blocks, *places[1], unit)
                at_once = max(1, _GATHERED_BYTES // (sheet.count * sheet.row_bytes))
                for start in range(0, len(indices), at_once):
                    found = rows.index_select(1, indices[start : start + at_once])
                    self._put(found, into, host_blocks[start : start + at_once], sheet)

    def _put(
        self, found: torch.Tensor, into: torch.Tensor, host_blocks: Int64Array, sheet: Sheet
    ) -> None:
        """Copies rows to their host blocks: those in one piece, where they follow one another."""
        is_broken = np.diff(host_blocks) != 1
        if sheet.step_bytes != sheet.row_bytes:
            is_broken[:] = True
        borders = [0, *(np.flatnonzero(is_broken) + 1).tolist(), len(host_blocks)]
        for first, end in pairwise(borders):
            host_block = int(host_blocks[first])
            for row in range(sheet.count):
                into[row, host_block : host_block + end - first].copy_(
                    found[row, first:end], non_blocking=self._streams is not None
                )


def _sheet_view(
    memory: torch.Tensor, sheet: Sheet, count: int, start: int, apart: int, unit_bytes: int
) -> torch.Tensor:
    """[row, block or host block, units] of so many blocks or host blocks."""
    import torch

    return torch.empty(0, dtype=integers_of(unit_bytes), device=memory.device).set_(
        memory.untyped_storage(),
        start // unit_bytes,
        (sheet.count, count, sheet.row_bytes // unit_bytes),
        (apart // unit_bytes, sheet.step_bytes // unit_bytes, 1),
    )
