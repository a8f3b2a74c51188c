"""The choice of which regions of a read go straight to their places, and which are staged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvpatch.geometry.overlap import DEVICE_MEMORY, HOST_MEMORY, Overlap, is_direct
from kvpatch.geometry.staged_plan import Share
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staging_pool import StagingPool

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.unlike_engines")


@dataclass(frozen=True)
class Progress:
    """A worker's progress thread, and the worker's NIXL agent as that thread may use it."""

    thread: ProgressThread
    agent: Any


class ChosenWays:
    """The choice of paths for one worker's reads.

    Args:
        mode: ``auto``, ``direct`` or ``staged``.
        pool: the pool that staged reads land in.
        device: the device that they are placed on.
    """

    def __init__(self, mode: str, pool: StagingPool, device: torch.device) -> None:
        self._mode = mode
        self._pool = pool
        self._costs = HOST_MEMORY if device.type == "cpu" else DEVICE_MEMORY

    def split(self, shares: Sequence[Share], engine_id: str) -> tuple[list[Share], list[Share]]:
        """Returns what goes straight to its place, and what goes through the pool.

        Args:
            engine_id: the peer.
        """
        direct: list[Share] = []
        staged: list[Share] = []
        for share in shares:
            if not len(share.segments):
                continue
            # Layers that are strided alike are judged once.
            known: dict[Any, bool] = {}
            for overlap in share.overlaps:
                if overlap.shape not in known:
                    known[overlap.shape] = self._is_direct(overlap, share)
            for kind, is_straight in ((direct, True), (staged, False)):
                chosen = tuple(one for one in share.overlaps if known[one.shape] is is_straight)
                if chosen:
                    kind.append(replace(share, overlaps=chosen))
        _LOG.debug(
            "%d regions of engine %s are read directly, %d staged",
            sum(len(share.overlaps) for share in direct),
            engine_id,
            sum(len(share.overlaps) for share in staged),
        )
        return direct, staged

    def _is_direct(self, overlap: Overlap, share: Share) -> bool:
        if self._mode != "auto":
            return self._mode == "direct"
        if overlap.staged_bytes > self._pool.size_bytes:
            return True
        return is_direct(overlap, share.segments, self._costs)
