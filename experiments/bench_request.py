"""What a step of D takes for one large request: python experiments/bench_request.py [--json FILE]

1,000 blocks of 16 tokens x 80 layers of one KV head, planned and posted as a worker does it in
the step that starts the load. "in the thread" is as engines read: the worker's reader pairs the
blocks and chooses the way ("plan"), and hands the read to the progress thread ("post"). Without
the thread the step does all of it: "plan" is the byte runs (or the first round of a staged read),
"prepare" NIXL's descriptors of them, "post" the transfer. "stock" names as many blocks of
descriptors that were prepared at the handshake. Both agents are real NIXL in this process; heads
have 16 channels in place of 128, which changes no count. Milliseconds, the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_transfer import DRAM, make_agent
from made_reader import preparing
from rich.console import Console
from rich.table import Table

from kvpatch.geometry.direct_plan import plan_runs
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList, pair_blocks
from kvpatch.geometry.staged_plan import Share, plan_chunks
from kvpatch.load.chosen_ways import Progress
from kvpatch.transfer.agent_gate import AgentGate, ProgressAgent
from kvpatch.transfer.nixl import Ends, prepare_read
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staging_pool import StagingPool
from tests.geometry.whole_caches import CacheSizes, named_layout

LAYERS, BLOCKS, TOKENS, CHANNELS, ITEM_BYTES = 80, 1000, 16, 16, 2
THREAD = "in the thread"
CHUNK_BYTES = 8 * 1024**2
BYTES = LAYERS * BLOCKS * TOKENS * 2 * CHANNELS * ITEM_BYTES


@dataclass(frozen=True)
class Measured:
    """One way; seconds are medians."""

    way: str
    descriptors: int
    plan_seconds: float
    prepare_seconds: float
    post_seconds: float

    @property
    def step_seconds(self) -> float:
        """What the step that starts the load takes: the thread plans and posts beside it."""
        return self.plan_seconds + self.prepare_seconds + self.post_seconds


class Pair:
    """P and D in this process, each with a cache of its own."""

    def __init__(self) -> None:
        self.memory = {name: np.zeros(BYTES, dtype=np.uint8) for name in "PD"}
        self.agents = {name: make_agent(name, 1, 200) for name in "PD"}
        for name, agent in self.agents.items():
            agent.register_memory([(self.address(name), BYTES, 0, "")], "DRAM")
        found = self.nixl.add_remote_agent(self.agents["P"].get_agent_metadata())
        self.ends = Ends(DRAM, DRAM, found.decode() if isinstance(found, bytes) else found)

    @property
    def nixl(self) -> Any:
        """D's agent."""
        return self.agents["D"]

    def address(self, name: str) -> int:
        """Of a side's memory."""
        return int(self.memory[name].ctypes.data)

    def planes(self, name: str, layout: str, tokens: int) -> tuple[Plane, ...]:
        """A side's cache in blocks of so many tokens."""
        blocks = BLOCKS * TOKENS // tokens
        sizes = CacheSizes(LAYERS, blocks, 1, tokens, CHANNELS, ITEM_BYTES)
        return tuple(named_layout(layout).planes(sizes, self.address(name), DRAM))

    def post(self, handle: Any) -> float:
        """The seconds that it takes to start a transfer, which is then waited for."""
        started = time.perf_counter()
        state = self.nixl.transfer(handle)
        seconds = time.perf_counter() - started
        while state == "PROC":
            state = self.nixl.check_xfer_state(handle)
        self.nixl.release_xfer_handle(handle)
        return seconds


def stock(pair: Pair) -> Callable[[], tuple[int, float, float, float]]:
    """A like pair's read, of descriptors that are there."""
    page = BYTES // (LAYERS * BLOCKS)
    sides = {}
    for name, agent in (("P", pair.ends.agent), ("D", "NIXL_INIT_AGENT")):
        starts = pair.address(name) + np.arange(LAYERS * BLOCKS) * page
        descs = [(int(start), page, 0) for start in starts]
        sides[name] = pair.nixl.prep_xfer_dlist(agent, pair.nixl.get_xfer_descs(descs, "DRAM"))
    order = np.random.default_rng(0).permutation(LAYERS * BLOCKS).astype(np.int32)

    def run() -> tuple[int, float, float, float]:
        started = time.perf_counter()
        handle = pair.nixl.make_prepped_xfer("READ", sides["D"], order, sides["P"], order, b"")
        prepared = time.perf_counter() - started
        return order.size, 0.0, prepared, pair.post(handle)

    return run


def heterogeneous(pair: Pair, p_tokens: int) -> Callable[[], tuple[int, float, float, float]]:
    """A read from blocks of other sizes, straight to its place."""
    theirs, ours = pair.planes("P", "LBHNC", p_tokens), pair.planes("D", "LBHNC", TOKENS)
    regions = [theirs[at : at + 2] for at in range(0, len(theirs), 2)]
    overlaps = overlaps_of(regions, ours)
    order = np.random.default_rng(0).permutation
    remote, local = order(BLOCKS * TOKENS // p_tokens), order(BLOCKS)

    def run() -> tuple[int, float, float, float]:
        started = time.perf_counter()
        blocks = BlockList(remote, p_tokens), BlockList(local, TOKENS)
        segments = pair_blocks(*blocks, 0, BLOCKS * TOKENS)
        copies = [copy for overlap in overlaps for copy in overlap.copies]
        plan = plan_runs([(segments, copies)])
        planned = time.perf_counter()
        runs = plan.remote_address, plan.local_address, plan.length
        handle = prepare_read(pair.nixl, pair.ends, *runs)
        prepared = time.perf_counter() - planned
        return len(plan), planned - started, prepared, pair.post(handle)

    return run


def staged(pair: Pair, p_tokens: int) -> Callable[[], tuple[int, float, float, float]]:
    """The first round of a read from another layout; the others follow while it is on its way."""
    theirs, ours = pair.planes("P", "LBNHC", p_tokens), pair.planes("D", "LBHNC", TOKENS)
    overlaps = overlaps_of([theirs[at : at + 2] for at in range(0, len(theirs), 2)], ours)
    order = np.random.default_rng(0).permutation
    remote, local = order(BLOCKS * TOKENS // p_tokens), order(BLOCKS)

    def run() -> tuple[int, float, float, float]:
        started = time.perf_counter()
        blocks = BlockList(remote, p_tokens), BlockList(local, TOKENS)
        segments = pair_blocks(*blocks, 0, BLOCKS * TOKENS)
        first = next(plan_chunks([Share(segments, overlaps)], lambda: CHUNK_BYTES))
        planned = time.perf_counter()
        runs = first.remote_address, pair.address("D") + first.staging_offset, first.length
        handle = prepare_read(pair.nixl, pair.ends, *runs)
        prepared = time.perf_counter() - planned
        return first.length.size, planned - started, prepared, pair.post(handle)

    return run


def in_thread(
    pair: Pair, layout: str, p_tokens: int, *, is_staged: bool
) -> Callable[[], tuple[int, float, float, float]]:
    """What the engine's thread does of a read: it pairs blocks, chooses the way, hands it on."""
    theirs, ours = pair.planes("P", layout, p_tokens), pair.planes("D", "LBHNC", TOKENS)
    order = np.random.default_rng(0).permutation
    remote, local = order(BLOCKS * TOKENS // p_tokens).tolist(), order(BLOCKS).tolist()
    gate, memory = AgentGate(), torch.from_numpy(pair.memory["D"])
    agent = ProgressAgent(pair.nixl, gate)

    def make(size_bytes: int) -> torch.Tensor:
        buffer = torch.ones(size_bytes, dtype=torch.uint8)
        agent.register_memory([(buffer.data_ptr(), size_bytes, 0, "")], "DRAM")
        return buffer

    pool = StagingPool(8 * CHUNK_BYTES, make)
    progress = Progress(ProgressThread(pool, torch.device("cpu"), gate), agent)
    mode = "staged" if is_staged else "direct"
    prepare = preparing(theirs, ours, memory, pool, progress, mode, pair.ends.agent)

    def run() -> tuple[int, float, float, float]:
        started = time.perf_counter()
        read = prepare(local, remote, BLOCKS * TOKENS - 1)  # the last block is a partial one
        prepared = time.perf_counter()
        read.start()
        handed = time.perf_counter()
        while (state := read.state()) == "PROC":
            time.sleep(1e-3)
        if state != "DONE":
            raise RuntimeError(f"a read ended as {state}")
        return read.telemetry().descCount, prepared - started, 0.0, handed - prepared

    return run


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    console, rows = Console(), []
    with console.status("making two agents"):
        pair = Pair()
    ways = {
        "stock, like": stock(pair),
        f"direct, P's blocks of 64, {THREAD}": in_thread(pair, "LBHNC", 64, is_staged=False),
        f"staged, P's blocks of 64 in LBNHC, {THREAD}": in_thread(
            pair, "LBNHC", 64, is_staged=True
        ),
        "direct, P's blocks of 64": heterogeneous(pair, 64),
        "staged, P's blocks of 64 in LBNHC, first round": staged(pair, 64),
    }
    with console.status("measuring") as status:
        for way, run in ways.items():
            status.update(way)
            found = [run() for _ in range(options.repeat)]
            medians = [statistics.median(seconds) for seconds in list(zip(*found, strict=True))[1:]]
            rows.append(Measured(way, found[0][0], *medians))
    table = Table(title=f"{BLOCKS:,} blocks x {LAYERS} layers, ms")
    for name in ("way", "descriptors", "of the step", "plan", "prepare", "post"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        times = (row.step_seconds, row.plan_seconds, row.prepare_seconds, row.post_seconds)
        table.add_row(row.way, f"{row.descriptors:,}", *(f"{t * 1e3:.2f}" for t in times))
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
