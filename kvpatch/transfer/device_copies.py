"""Copies of a device's blocks into host blocks: one gather, then its rows.

On a device with streams in one of their own, so that the model goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpatch.transfer.host_block_rows import Sheet, StorageCopy, unit_bytes
from kvpatch.transfer.plane_bytes import integers_of, uploaded
from kvpatch.transfer.runs import Run, runs_of, within

if TYPE_CHECKING:
    import torch

#: Of device memory at once, for blocks on their way.
_GATHERED_BYTES = 32 * 1024**2


class DeviceCopies:
    """Copies by torch. On a device with streams they are there after :meth:`settle`.

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
        of = np.asarray(blocks, dtype=np.int64)[order]
        runs = runs_of(into[order])
        if self._streams is None:
            self._gather(torch.from_numpy(of).to(self._device), runs, non_blocking=False)
            return
        if self._stream is None:
            self._stream = self._streams.Stream(device=self._device)
        current = self._streams.current_stream(self._device)
        with self._streams.stream(self._stream):
            (indices,) = uploaded([of], self._device)
            self._stream.wait_stream(current)
            self._gather(indices, runs, non_blocking=True)
            self._event = self._streams.Event()
            self._event.record(self._stream)

    def settle(self) -> None:
        """Waits until all that was saved is in host memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def _gather(self, indices: torch.Tensor, runs: Sequence[Run], non_blocking: bool) -> None:
        """One gather a sheet, as long as that takes little device memory."""
        for source, host, sheets in self._copies:
            for sheet in sheets:
                unit = unit_bytes(source, host, sheet)
                rows, into = (
                    _sheet_view(memory, sheet, count, start, apart, unit)
                    for memory, count, start, apart in (
                        (source, self._blocks, sheet.source, sheet.source_apart),
                        (host, self._host_blocks, sheet.target, sheet.target_apart),
                    )
                )
                at_once = max(1, _GATHERED_BYTES // (sheet.count * sheet.row_bytes))
                whole = sheet.step_bytes == sheet.row_bytes
                for start in range(0, len(indices), at_once):
                    found = rows.index_select(1, indices[start : start + at_once])
                    for run in within(runs, start, at_once, split=not whole):
                        at = run.first - start
                        for row in range(sheet.count):
                            into[row, run.host_block : run.host_block + run.length].copy_(
                                found[row, at : at + run.length], non_blocking=non_blocking
                            )


def streams_of(device: torch.device) -> Any:
    """The module of the device's streams; None where it has none."""
    import torch

    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") and hasattr(module, "Event") else None


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
