"""How full the staging pool and the host buffer are, said when it has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpatch.host_buffer.host_block_table import HostBlockTable
from kvpatch.host_buffer.scheduler import HostBufferScheduler
from kvpatch.host_buffer.worker import HostBuffer, SaveCosts
from kvpatch.observe.book import Book
from kvpatch.observe.catalogue import (
    HOST_BLOCKS,
    HOST_WAITING,
    POOL_BYTES,
    POOL_USED_BYTES,
    POOL_WAITING,
    POOL_WAITS,
    SAVE_SECONDS,
    SAVED_BLOCKS,
)
from kvpatch.worker.state import SchedulerState, WorkerState

if TYPE_CHECKING:
    from kvpatch.load.reader import ReadsOfOthers
    from kvpatch.transfer.staging_pool import StagingPool


@dataclass
class Usage:
    """What was said last; of one worker, or of one scheduler."""

    _pool: tuple[int, int, int] = (-1, 0, 0)
    _waits: int = 0
    _costs: SaveCosts | None = None
    _saved: int = 0
    _save_seconds: float = 0.0
    _host_blocks: tuple[int, int, int, int] = (-1, 0, 0, 0)

    def has_changed(self, pool: StagingPool) -> bool:
        """Whether there is something to say of a staging pool; in every step."""
        now = (pool.size_bytes, pool.taken_bytes, pool.waiting)
        return now != self._pool or pool.waits != self._waits

    def look_at_pool(self, pool: StagingPool, rank: str, book: Book) -> None:
        """Says what has changed of a staging pool."""
        now = (pool.size_bytes, pool.taken_bytes, pool.waiting)
        if now != self._pool:
            for metric, value, before in zip(
                (POOL_BYTES, POOL_USED_BYTES, POOL_WAITING), now, self._pool, strict=True
            ):
                if value != before or self._pool[0] < 0:
                    book.add(metric, value, rank)
            self._pool = now
        waits = pool.waits  # the thread of the reads may count on
        if waits > self._waits:
            book.add(POOL_WAITS, waits - self._waits)
        self._waits = waits

    def look_at_saves(self, costs: SaveCosts, book: Book) -> None:
        """Says what was saved since the last step; a new buffer begins anew."""
        if costs is not self._costs:
            self._costs, self._saved, self._save_seconds = costs, 0, 0.0
        if costs.blocks > self._saved:
            book.add(SAVED_BLOCKS, costs.blocks - self._saved)
            book.add(SAVE_SECONDS, costs.seconds - self._save_seconds)
            self._saved, self._save_seconds = costs.blocks, costs.seconds

    def look_at_host_blocks(self, table: HostBlockTable, book: Book) -> None:
        """Says what has changed of P's host blocks."""
        now = (table.size, table.reserved, table.held, table.waiting)
        if now == self._host_blocks:
            return
        self._host_blocks = now
        for state, value in zip(HOST_BLOCKS.values, now, strict=False):
            book.add(HOST_BLOCKS, value, state)
        book.add(HOST_WAITING, now[-1])


def look_at_worker(worker: Any, state: WorkerState, reads: ReadsOfOthers | None) -> None:
    """Says what has changed of a worker's staging pool and of its host buffer.

    Args:
        reads: what has the pool; None where it has not read from anybody.
    """
    usage, buffer = state.of(Usage), state.held(HostBuffer)
    if reads is not None and usage.has_changed(reads.pool):
        usage.look_at_pool(reads.pool, str(worker.vllm_config.parallel_config.rank), state.book)
    if buffer is not None:
        usage.look_at_saves(buffer.costs, state.book)


def look_at_scheduler(state: SchedulerState) -> None:
    """Says what has changed of P's host blocks."""
    buffer = state.held(HostBufferScheduler)
    if buffer is not None and buffer.is_linked:
        state.of(Usage).look_at_host_blocks(buffer.table, state.book)
