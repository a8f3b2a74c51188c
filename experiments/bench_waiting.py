"""What a step costs where reads wait for the staging pool.

    python experiments/bench_waiting.py [--steps 50] [--json FILE] [--check]

As a release asks for the state of every read in every step, of which some have the pool's space
on the wire and all others wait. NIXL is a fake that is never done, so that nothing but the
waiting is measured. "of the reads" is what their states take; "of the agent" is the whole of it,
asked of what a release has for its agent; "a bare agent" is the same loop over as many handles of
the fake alone, which nothing goes below. Milliseconds: the median of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from goals import Goal, add_options, conclude, console_of
from rich.console import Console
from rich.table import Table

from kvpatch.geometry.staged_plan import Chunk, Placement
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.load.nixl_proxy import ReadingAgent
from kvpatch.load.reader import Reader
from kvpatch.transfer.agent_gate import AgentGate, EngineAgent
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.own_read import OwnRead
from kvpatch.transfer.progress_thread import BackgroundRead, ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.transfer.unposted import Unposted

GOAL_MS = 0.1
GOAL_READS = 1000
CHUNK_BYTES = 1024
DRAM = Memory("DRAM")


@dataclass(frozen=True)
class Row:
    """One number of reads; milliseconds of a step."""

    reads: int
    peers: int
    is_in_thread: bool
    of_reads_ms: float
    of_agent_ms: float
    bare_ms: float


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

    def give_up(self, copies: Iterable[Callable[[], bool]]) -> None:
        """Nothing is under way."""


def rounds() -> Iterator[Chunk]:
    """A read of two rounds."""
    for _ in range(2):
        numbers = np.zeros(1, dtype=np.int64)
        yield Chunk(numbers, numbers, numbers + CHUNK_BYTES, CHUNK_BYTES, ())


def measure(count: int, peers: int, steps: int, *, is_in_thread: bool) -> Row:
    """The median steps with so many reads of so many peers, through a pool of few rounds.

    Args:
        is_in_thread: they go on in the progress thread; else in these steps.
    """
    nixl, gate = _Nixl(), AgentGate()
    pool = StagingPool(16 * CHUNK_BYTES, lambda size: torch.empty(size, dtype=torch.uint8))
    thread = ProgressThread(pool, torch.device("cpu"), gate)
    staged = [
        StagedRead(
            nixl,
            pool,
            _Caches(),
            Ends(DRAM, DRAM, f"peer {number % peers}"),
            b"",
            Unposted((), rounds()),
        )
        for number in range(count)
    ]
    reads: list[OwnRead] = [BackgroundRead(r, thread) if is_in_thread else r for r in staged]
    for read in reads:
        read.start()
    time.sleep(1.0 if is_in_thread else 0.0)  # it takes them all on
    # Nothing is prepared here, so that nobody asks the reader.
    reader = cast(Reader, None)
    agent = ReadingAgent(EngineAgent(nixl, gate), reader, None)
    handles = [object() for _ in reads]
    loops: tuple[Callable[[], None], ...] = (
        lambda: _ask_reads(reads),
        lambda: _ask(agent, reads),
        lambda: _ask(nixl, handles),
    )
    taken: list[list[float]] = [[] for _ in loops]
    for _ in range(steps):  # by turns, so that noise is shared
        for loop, found in zip(loops, taken, strict=True):
            started = time.perf_counter()
            loop()
            found.append(1e3 * (time.perf_counter() - started))
            time.sleep(2e-3)
    thread.stop()
    return Row(count, peers, is_in_thread, *map(statistics.median, taken))


def _ask_reads(reads: Sequence[OwnRead]) -> None:
    for read in reads:
        read.state()


def _ask(agent: Any, handles: Sequence[object]) -> None:
    for handle in handles:
        agent.check_xfer_state(handle)


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="ms of a step")
    for name in ("reads", "peers", "go on in", "of the reads", "of the agent", "a bare agent"):
        table.add_column(name, justify="left" if name == "go on in" else "right")
    for row in rows:
        table.add_row(
            f"{row.reads:,}", str(row.peers), "the thread" if row.is_in_thread else "the steps",
            f"{row.of_reads_ms:.3f}", f"{row.of_agent_ms:.3f}", f"{row.bare_ms:.3f}",
        )  # fmt: skip
    console.print(table)


def goals(rows: Sequence[Row]) -> list[Goal]:
    return [
        Goal(f"{row.reads:,} reads of {row.peers} peers, ms of the reads", row.of_reads_ms, GOAL_MS)
        for row in rows
        if row.reads == GOAL_READS and row.is_in_thread
    ]


def main() -> None:
    """Measures, prints, and judges where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    add_options(parser)
    options = parser.parse_args()
    console = console_of(100)
    rows = [
        measure(count, peers, options.steps, is_in_thread=is_in_thread)
        for count in (100, GOAL_READS, 4 * GOAL_READS)
        for peers in (1, 8, 64)
        for is_in_thread in (True, False)
    ]
    show(rows, console)
    conclude(rows, goals(rows), options, console)


if __name__ == "__main__":
    main()
