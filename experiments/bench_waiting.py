"""What a step costs where reads wait for the staging pool: python experiments/bench_waiting.py

As a release asks for the state of every read in every step, of which some have the pool's space
on the wire and all others wait. NIXL is a fake that is never done, so that nothing but the
waiting is measured. The goal is under 1 ms of a step for 1,000 reads; ``--check`` exits 1 where
that is missed. Milliseconds: the median of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvpatch.geometry.memory import Memory
from kvpatch.geometry.staged_plan import Chunk, Placement
from kvpatch.transfer.agent_gate import AgentGate
from kvpatch.transfer.background_read import BackgroundRead
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.own_read import OwnRead
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.transfer.unposted import Unposted

GOAL_MS = 1.0
GOAL_READS = 1000
CHUNK_BYTES = 1024
DRAM = Memory("DRAM")


class _Nixl:
    """Fake: every transfer is on the wire for ever."""

    def get_xfer_descs(self, descriptors: Any, kind: str) -> Any:
        return descriptors

    def initialize_xfer(self, *arguments: Any) -> object:
        return object()

    def transfer(self, handle: object) -> str:
        return "PROC"

    def check_xfer_state(self, handle: object) -> str:
        return "PROC"

    def release_xfer_handle(self, handle: object) -> None:
        """Nothing to let go of."""


class _Caches:
    """Fake: nothing lands."""

    def mark(self) -> None:
        """No device."""

    def place(
        self, staging: torch.Tensor, placements: tuple[Placement, ...], after: None
    ) -> Callable[[], bool]:
        return lambda: True

    def settle(self) -> None:
        """Nothing is under way."""


def rounds() -> Iterator[Chunk]:
    """A read of two rounds."""
    for _ in range(2):
        numbers = np.zeros(1, dtype=np.int64)
        yield Chunk(numbers, numbers, numbers + CHUNK_BYTES, CHUNK_BYTES, ())


def step_ms(count: int, peers: int, steps: int, *, in_thread: bool) -> float:
    """The median step with so many reads of so many peers, through a pool of few rounds.

    Args:
        in_thread: they go on in the progress thread; else in these steps.
    """
    nixl = _Nixl()
    pool = StagingPool(16 * CHUNK_BYTES, lambda size: torch.empty(size, dtype=torch.uint8))
    thread = ProgressThread(pool, torch.device("cpu"), AgentGate())
    staged = [
        StagedRead(
            nixl,
            pool,
            _Caches(),
            Ends(DRAM, DRAM, f"peer {number % peers}"),
            b"",
            Unposted((), rounds()),
            is_paced=in_thread,
        )
        for number in range(count)
    ]
    reads: list[OwnRead] = [BackgroundRead(r, thread) if in_thread else r for r in staged]
    for read in reads:
        read.start()
    time.sleep(1.0 if in_thread else 0.0)  # it takes them all on
    found = []
    for _ in range(steps):
        started = time.perf_counter()
        for read in reads:
            read.state()
        found.append(1e3 * (time.perf_counter() - started))
        time.sleep(2e-3)
    thread.stop()
    return statistics.median(found)


def main() -> int:
    """Exit status 0 where the goal is met, or nobody asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--check", action="store_true", help="exit 1 where the goal is missed")
    arguments = parser.parse_args()
    table = Table("reads", "peers", "go on in", "ms a step", title=__doc__.partition("\n")[0])
    is_met = True
    for count in (100, GOAL_READS, 4 * GOAL_READS):
        for peers in (1, 8, 64):
            for in_thread in (True, False):
                found = step_ms(count, peers, arguments.steps, in_thread=in_thread)
                is_met = is_met and (count != GOAL_READS or found < GOAL_MS)
                where = "the thread" if in_thread else "the steps"
                table.add_row(str(count), str(peers), where, f"{found:.3f}")
    Console().print(table)
    return 0 if is_met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
