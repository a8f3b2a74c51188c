"""What reads and copies take on this machine, measured a piece at a time in memory of its own.

The agent reads from itself, which over UCX costs what a read from another process of the machine
does: posting, completing, the bytes. Of a network it says nothing; what reads from a peer really
take is ``read_times``. Only host memory is measured: within one process and device, transports are
others than between two, and copies take less than asking for them.

Why memory of its own, and not the staging pool's: the pool is made by the first read that needs
it, and a peer that is read directly never does; and no request may wait for the probe. It stays
registered for as long as the pool (NIXL keeps what it knows of an agent's own memory after that
was taken back, and would believe it of whatever lies there next).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpatch.core.errors import KvpatchError
from kvpatch.geometry.direct_or_staged import Costs
from kvpatch.geometry.measured_costs import Timed, probed_costs
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.plane_copies import CopyAxis, CopyStrides
from kvpatch.geometry.segments import Int64Array, Segments
from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.free_space import Space
from kvpatch.transfer.lost_transfers import lose
from kvpatch.transfer.nixl import Ends, errors_of, prepare_read
from kvpatch.transfer.staging_pool import StagingPool

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.staging")

#: Of what is read, and of where it lands.
_SIDE_BYTES = 1024**2
OWN_BYTES = 2 * _SIDE_BYTES
#: (runs, bytes of one). Fewer than NIXL spreads over its threads: the waking of those is not what
#: a run takes.
_SMALL = (1000, 512)
_LARGE = (16, _SIDE_BYTES // 16)
#: At once of memory that nobody has touched, which is slow on virtual machines.
_TOUCHED_BYTES = 256 * 1024
#: Rows of the copy, about as long as where the two ways cost the same.
_ROW_BYTES = 4096
_ROWS, _TOKENS = 4, 2
_LAYER = "probe"
_TIMES = 3
_LONGEST_SECONDS = 0.02
#: Of looking after a read that took longer, which is over soon on a busy machine.
_LOOKED_AFTER_SECONDS = 1.0
_WAIT_SECONDS = 2e-5


class CostProbe:
    """One worker's; measures once, as far as :meth:`pieces` is gone through.

    Args:
        nixl: the agent, as the thread may use it that goes through the pieces.
        pool: of host memory; nothing of it is used, but memory of the same kind.
        memory: what NIXL calls that kind.

    Attributes:
        costs: None until all was measured, and for good where something failed.
    """

    def __init__(self, nixl: Any, pool: StagingPool, memory: Memory) -> None:
        self.costs: Costs | None = None
        self._nixl = nixl
        self._own = pool.aside(OWN_BYTES)
        self._memory = memory
        self._errors: tuple[type[Exception], ...] = (
            KvpatchError,
            RuntimeError,
            MemoryError,
            ValueError,
            # A binding that answers otherwise must not cost the thread that reads.
            TypeError,
            AttributeError,
            LookupError,
            OSError,
            *errors_of(nixl),
        )

    def pieces(self) -> Iterator[None]:
        """Measures; each step takes about a millisecond, and leaves nothing on the wire.

        But for a read that takes too long: it is the last one, and further steps look after it.
        """
        yield from self._guarded(self._pieces(), "what a read takes here could not be measured")
        yield from self._guarded(self._let_go(), "such a read cannot be looked after")

    def _guarded(self, pieces: Iterator[None], failure: str) -> Iterator[None]:
        try:
            yield from pieces
        except self._errors as error:
            _LOG.debug("%s: %s", failure, error, exc_info=True)

    def _let_go(self) -> Iterator[None]:
        """Releases what was given up as soon as it is over, and leaves it if that takes long."""
        until = time.monotonic() + _LOOKED_AFTER_SECONDS
        while self._own.lost_bytes and time.monotonic() < until:
            yield
            self._own.recover()

    def _pieces(self) -> Iterator[None]:
        name = getattr(self._nixl, "name", None)
        if not isinstance(name, str):
            raise ValueError("the agent does not tell its name")
        ends = Ends(self._memory, self._memory, name)
        space = self._space()
        for part in self._own.memory(space).split(_TOUCHED_BYTES):
            yield
            part.zero_()
        whole = self._own.memory(space)
        into = whole[_SIDE_BYTES:]
        caches, placements = Caches({_LAYER: into}), (_placement(into),)
        small, large, copies = [], [], []
        for _ in range(_TIMES):
            yield
            small.append(self._read(ends, space, *_SMALL))
            yield
            large.append(self._read(ends, space, *_LARGE))
            yield
            came = time.monotonic()
            caches.place(whole[:_SIDE_BYTES], placements, None)
            copies.append(Timed(1, _SIDE_BYTES, time.monotonic() - came))
        self.costs = probed_costs(small, large, copies)
        _LOG.info(
            "measured here: a run takes %.2f us, what is read comes at %.1f GB/s, and goes on from "
            "the staging pool at %.1f",
            self.costs.run_seconds * 1e6,
            self.costs.wire_bytes_per_second / 1e9,
            self.costs.copy_bytes_per_second / 1e9,
        )

    def _space(self) -> Space:
        space = self._own.take(self, "", self._own.size_bytes)
        self._own.leave(self)
        if space is None:
            raise ValueError("there is no memory to measure in")
        return space

    def _read(self, ends: Ends, space: Space, runs: int, run_bytes: int) -> Timed:
        """Reads scattered runs of the first half into the second."""
        start = self._own.memory(space).data_ptr()
        places = _scattered(runs, _SIDE_BYTES // runs // run_bytes * run_bytes)
        came = time.monotonic()
        handle = prepare_read(
            self._nixl,
            ends,
            start + places,
            start + _SIDE_BYTES + np.sort(places),
            np.full(runs, run_bytes, dtype=np.int64),
        )
        is_over = False
        try:
            is_over = self._has_ended(handle, came)
        finally:
            if not is_over:  # it may still be written
                lose(self._nixl, handle, self._own, space)
        seconds = time.monotonic() - came
        self._nixl.release_xfer_handle(handle)
        return Timed(runs, runs * run_bytes, seconds)

    def _has_ended(self, handle: Any, came: float) -> bool:
        """Waits for a transfer.

        Raises:
            ValueError: it takes too long, or fails.
        """
        state = self._nixl.transfer(handle)
        while state == "PROC" and time.monotonic() - came < _LONGEST_SECONDS:
            time.sleep(_WAIT_SECONDS)
            state = self._nixl.check_xfer_state(handle)
        if state != "DONE":
            raise ValueError(f"a read from this agent's own memory is {state} after all")
        return True


def _scattered(count: int, apart: int) -> Int64Array:
    return np.random.default_rng(0).permutation(count).astype(np.int64) * apart


def _placement(into: torch.Tensor) -> Placement:
    """Blocks whose rows of heads and tokens change places, to blocks in any order."""
    block_bytes = _ROWS * _TOKENS * _ROW_BYTES
    count = _SIDE_BYTES // block_bytes
    zeros = np.zeros(count, dtype=np.int64)
    return Placement(
        layer=_LAYER,
        staging_offset=0,
        local_address=into.data_ptr(),
        strides=CopyStrides(
            item_bytes=1,
            block=CopyAxis(count, block_bytes, block_bytes),
            token=CopyAxis(_TOKENS, _ROWS * _ROW_BYTES, _ROW_BYTES),
            inner=(
                CopyAxis(_ROW_BYTES, 1, 1),
                CopyAxis(_ROWS, _ROW_BYTES, _TOKENS * _ROW_BYTES),
            ),
        ),
        segments=Segments(
            np.arange(count, dtype=np.int64), zeros, _scattered(count, 1), zeros, zeros + _TOKENS
        ),
    )
