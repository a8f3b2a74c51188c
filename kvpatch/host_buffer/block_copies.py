"""Copies of blocks into host blocks by torch: a gather of each row of blocks, then its rows.

On a device with streams in one of their own, so that the model goes on meanwhile. Of tensors that
have a storage; others (TPU, XLA) are copied by ``HostPool`` with ``transfer/storageless.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpatch.geometry.segments import Int64Array
from kvpatch.host_buffer.host_block_rows import Rows, StorageCopy
from kvpatch.transfer.one_memory import streams_of
from kvpatch.transfer.plane_bytes import integers_of, uploaded

if TYPE_CHECKING:
    import torch

_WIDEST_BYTES = 8
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
        """Gathers rows of as many blocks at once as take little of the device's memory."""
        for source, host, all_rows in self._copies:
            ends = gcd(_WIDEST_BYTES, source.data_ptr(), host.data_ptr())
            for rows in all_rows:
                unit = gcd(ends, *rows)  # the widest aligned items at both ends
                blocks = _view(source, rows, self._blocks, rows.start, unit)
                into = _view(host, rows, self._host_blocks, rows.target, unit)
                at_once = max(1, _GATHERED_BYTES // rows.row_bytes)
                for start in range(0, len(indices), at_once):
                    found = blocks.index_select(0, indices[start : start + at_once])
                    self._put(found, into, host_blocks[start : start + at_once])

    def _put(self, found: torch.Tensor, into: torch.Tensor, host_blocks: Int64Array) -> None:
        """Copies rows to their host blocks: those in one piece, where they follow one another."""
        is_broken = np.diff(host_blocks) != 1
        if not into.is_contiguous():
            is_broken[:] = True
        borders = [0, *(np.flatnonzero(is_broken) + 1).tolist(), len(host_blocks)]
        for first, end in pairwise(borders):
            host_block = int(host_blocks[first])
            into[host_block : host_block + end - first].copy_(
                found[first:end], non_blocking=self._streams is not None
            )


def _view(
    memory: torch.Tensor, rows: Rows, count: int, start: int, unit_bytes: int
) -> torch.Tensor:
    """[block or host block, units] of so many of them."""
    import torch

    return torch.empty(0, dtype=integers_of(unit_bytes), device=memory.device).set_(
        memory.untyped_storage(),
        start // unit_bytes,
        (count, rows.row_bytes // unit_bytes),
        (rows.step_bytes // unit_bytes, 1),
    )
