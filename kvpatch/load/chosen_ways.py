"""Which regions of a read go straight to their places, and which through the staging pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpatch.geometry.direct_or_staged import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    Costs,
    is_direct,
    token_bytes,
)
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.overlap import Overlap
from kvpatch.geometry.staged_plan import Share
from kvpatch.transfer.cost_probe import CostProbe
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.read_times import ReadTimes
from kvpatch.transfer.staging_pool import StagingPool

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.unlike_engines")


@dataclass(frozen=True)
class Progress:
    """A worker's progress thread, and the worker's NIXL agent as that thread may use it."""

    thread: ProgressThread
    agent: Any


class Split(NamedTuple):
    """Shares of a read by their ways.

    Attributes:
        staged_bytes: what is wanted of those that go through the pool.
    """

    direct: list[Share]
    staged: list[Share]
    staged_bytes: int


class ChosenWays:
    """One worker's choice: by what is built in, what was measured here, and what reads took.

    Args:
        mode: ``auto``, ``direct`` or ``staged``.
        pool: where staged reads land.
        device: where they are placed.
        progress: None where reads go on in the engine's steps alone.

    Attributes:
        probe: what measures on this machine; None where nothing is to be measured.
    """

    def __init__(
        self, mode: str, pool: StagingPool, device: torch.device, progress: Progress | None
    ) -> None:
        self._mode = mode
        self._pool = pool
        self._is_host = device.type == "cpu"
        self._progress = progress
        self.probe: CostProbe | None = None

    def measure(self, memory: Memory) -> None:
        """Measures once what reads take on this machine, where a choice depends on it.

        It waits for a peer to be read from, and measures on the thread of the reads while there are
        none.
        """
        is_needed = self._mode == "auto" and self._is_host and self.probe is None
        if is_needed and self._progress is not None:
            self.probe = CostProbe(self._progress.agent, self._pool, memory)
            self._progress.thread.do_aside(self.probe.pieces())

    def split(self, shares: Sequence[Share], times: ReadTimes, engine_id: str) -> Split:
        """Returns what goes straight to its place, and what goes through the pool."""
        costs = times.costs(self._start)
        direct: list[Share] = []
        staged: list[Share] = []
        staged_bytes = 0
        for share in shares:
            if not len(share.segments):
                continue
            straight: list[Overlap] = []
            rest: list[Overlap] = []
            tokens = int(share.segments.tokens.sum())
            # Layers that are strided alike are judged once: their bytes through the pool, or None.
            known: dict[Any, int | None] = {}
            for overlap in share.overlaps:
                shape = overlap.shape
                size_bytes = known.get(shape, -1)
                if size_bytes == -1:  # not judged yet
                    goes_straight = self._is_direct(overlap, share, costs)
                    size_bytes = None if goes_straight else tokens * token_bytes(overlap)
                    known[shape] = size_bytes
                if size_bytes is None:
                    straight.append(overlap)
                else:
                    rest.append(overlap)
                    staged_bytes += size_bytes
            for overlaps, kind in ((straight, direct), (rest, staged)):
                if overlaps:
                    kind.append(replace(share, overlaps=tuple(overlaps)))
        _LOG.debug(
            "%d regions of engine %s are read directly, %d staged",
            sum(len(share.overlaps) for share in direct),
            engine_id,
            sum(len(share.overlaps) for share in staged),
        )
        return Split(direct, staged, staged_bytes)

    @property
    def _start(self) -> Costs:
        """Returns the costs that are assumed of a peer that was not read from."""
        if self.probe is not None and self.probe.costs is not None:
            return self.probe.costs
        return HOST_MEMORY if self._is_host else DEVICE_MEMORY

    def _is_direct(self, overlap: Overlap, share: Share, costs: Costs) -> bool:
        if self._mode != "auto":
            return self._mode == "direct"
        if overlap.staged_bytes > self._pool.size_bytes:
            return True
        return is_direct(overlap, share.segments, costs)
