"""Measures reads of a cache into one of another geometry, beside stock's read of a like one.

    python experiments/bench_transfer.py [--mib 128] [--repeat 9] [--device cuda] [--json FILE]

Two processes with one NIXL agent each. "stock, both like P" is a release's read between two engines
with P's geometry: one prepared descriptor for each block and layer. "direct" and "staged" read the
same tokens into D's geometry, with the whole cost of a request: pairing, planning, posting,
copying, waiting. They run in the progress thread, as in an engine, and the copies in a thread of
their own. The bytes of each row are compared before it is timed. Blocks are scattered.

"behind its last byte" is from when NIXL says that the last transfer has landed until the loop sees
that the read is done, which looks once a millisecond.

"bound" is a limit that no staged read can beat here: stock's read of the same bytes, and beside it
a thread that copies as many bytes within the processor's cache. "waits ms" is how long kvpatch's
threads had work and no processor (Linux's schedstat): NIXL's own threads never sleep. On a device
the bound is a copy of as many bytes on it.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Goal, Published, conclude, console_of, options_of

from kvpatch.geometry.direct_plan import plan_parts
from kvpatch.geometry.overlap import DEVICE_MEMORY, HOST_MEMORY, is_direct, overlaps_of
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList, Segments, pair_blocks
from kvpatch.geometry.staged_plan import Share, plan_chunks
from kvpatch.tools.verify.workers import WorkerMemory, beside_prefill, noise
from kvpatch.transfer import kernel_thread
from kvpatch.transfer.agent_gate import AgentGate, EngineAgent, ProgressAgent
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.progress_thread import BackgroundRead, ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from tests.geometry.whole_caches import CacheSizes, as_array, named_layout

_COPY_BYTES = 4 * 1024**2
#: How often a loop looks that does nothing else, without taking a processor for it.
_LOOK_SECONDS = 1e-3
POOL_BYTES = 256 * 1024**2
#: vLLM's default from 0.11.1 on (8 on 0.11.0, NIXL's own before).
THREADS = 4


@dataclass(frozen=True)
class Model:
    """The facts on which both sides agree."""

    name: str
    layers: int
    heads: int
    channels: int
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of a token's keys and values in all layers."""
        return self.layers * self.heads * 2 * self.channels * self.item_bytes


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode cache: layout and tokens of a block."""

    model: Model
    remote_layout: str
    remote_tokens: int
    local_layout: str
    local_tokens: int

    def tokens_in(self, size_bytes: int) -> int:
        """Returns the tokens that so many bytes hold, in whole blocks of both sides."""
        lot = math.lcm(self.remote_tokens, self.local_tokens)
        return max(1, size_bytes // self.model.token_bytes // lot) * lot

    def __str__(self) -> str:
        return (
            f"{self.remote_layout} {self.remote_tokens} -> {self.local_layout} {self.local_tokens}"
        )


GQA = Model("8 KV heads of 128, bf16, 32 layers", 32, 8, 128, 2)
CPU = Model("CPU keys by column, 4 KV heads of 64, float32, 16 layers", 16, 4, 64, 4)
PAIRS = (
    Pair(GQA, "LBHNC", 128, "LBHNC", 32),
    Pair(GQA, "LBHNC", 32, "LBHNC", 128),
    Pair(GQA, "LBHNC", 16, "LBHNC", 64),
    Pair(GQA, "LBNHC", 128, "LBNHC", 32),
    Pair(GQA, "LBNHC", 16, "LBHNC", 16),
    Pair(GQA, "LBHNC", 16, "LBNHC", 16),
    Pair(GQA, "LBNHC", 96, "LBHNC", 64),
    Pair(CPU, "CPU_packed", 128, "CPU_packed", 32),
    Pair(CPU, "CPU_packed", 32, "CPU_packed", 128),
)


@dataclass
class Measured:
    """One row; seconds are medians over the repeats."""

    model: str
    pair: str
    way: str
    seconds: float
    gb_per_second: float
    of_like_p: float
    of_bound: float
    descriptors: int
    working_seconds: float
    waiting_seconds: float
    behind_seconds: float


class Landing:
    """NIXL's agent, which takes note of when a transfer was last seen to have landed."""

    def __init__(self, agent: Any) -> None:
        self._agent, self.landed = agent, 0.0

    def check_xfer_state(self, handle: Any) -> Any:
        state = self._agent.check_xfer_state(handle)
        if state == "DONE":
            self.landed = time.perf_counter()
        return state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


def wait_for(memory: torch.Tensor) -> None:
    """Waits until the memory's device has finished all its work."""
    if memory.device.type != "cpu":
        torch.get_device_module(memory.device).synchronize()


def prepared(own: WorkerMemory, count: int, run_bytes: int) -> tuple[Any, Any]:
    """Prepares so many runs from the start of both memories: local, remote."""
    runs = np.full((count, 3), (0, run_bytes, 0), dtype=np.uint64)
    runs[:, 0] = np.arange(count) * run_bytes

    def of(name: str, address: int) -> Any:
        placed = runs + np.array((address, 0, 0), dtype=np.uint64)
        described = own.agent.get_xfer_descs(placed, own.kind.kind)
        return own.agent.prep_xfer_dlist(name, described)

    ours = of("NIXL_INIT_AGENT", own.memory.data_ptr())
    return ours, of(own.ends.agent, own.remote_address)


def wait_for_transfer(agent: Any, handle: Any) -> None:
    """Posts a transfer of NIXL's, and waits until it is done."""
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"a transfer ended as {state}")
    agent.release_xfer_handle(handle)


Way = Callable[[], int]
"""A read; returns the number of its descriptors."""


class Setup:
    """One pair on the two memories."""

    def __init__(self, pair: Pair, tokens: int, decode: WorkerMemory) -> None:
        self.pair, self.tokens, self.decode = pair, tokens, decode
        self.total_bytes = tokens * pair.model.token_bytes
        order = np.random.default_rng(0).permutation
        n_remote, n_local = -(-tokens // pair.remote_tokens), -(-tokens // pair.local_tokens)
        self.remote_ids, self.local_ids = order(n_remote), order(n_local)
        model = pair.model
        sizes = CacheSizes(
            model.layers, n_remote, model.heads, pair.remote_tokens, model.channels,
            model.item_bytes,
        )  # fmt: skip
        self.remote = named_layout(pair.remote_layout).planes(
            sizes, decode.remote_address, decode.kind
        )
        sizes = replace(sizes, blocks=n_local, block_tokens=pair.local_tokens)
        address = decode.memory.data_ptr()
        self.local = named_layout(pair.local_layout).planes(sizes, address, decode.kind)
        by_layer: dict[str, list[Plane]] = {}
        for plane in self.remote:
            by_layer.setdefault(plane.layer, []).append(plane)
        self.overlaps = overlaps_of(list(by_layer.values()), self.local)
        device = decode.memory.device
        self.pool = StagingPool(POOL_BYTES, self._register, on_device=device.type != "cpu")
        self.gate, self.landing = AgentGate(), Landing(decode.agent)
        self.behind_seconds = 0.0
        self.engine_agent = EngineAgent(decode.agent, self.gate)
        self.thread = ProgressThread(self.pool, device, self.gate)
        self.caches = Caches(dict.fromkeys(by_layer, decode.memory))
        self.caches.thread = self.thread.copying
        # Made and registered before anything is timed, as it is for all but the first request.
        turn = self.pool.line_up(0, "")
        space: Any = self.pool.take(turn, 1)
        self.pool.leave(turn)
        self.pool.give(space)

    def _register(self, size_bytes: int) -> torch.Tensor:
        device = self.decode.memory.device
        buffer = torch.full((size_bytes,), 1, dtype=torch.uint8, device=device)  # all resident
        wait_for(buffer)
        place = (buffer.data_ptr(), size_bytes, 0, "")
        self.decode.agent.register_memory([place], self.decode.kind.kind)
        return buffer

    def segments(self) -> Segments:
        """Pairs the blocks of all tokens of the request."""
        return pair_blocks(
            BlockList(self.remote_ids, self.pair.remote_tokens),
            BlockList(self.local_ids, self.pair.local_tokens),
            0,
            self.tokens,
        )

    def like(self, block_tokens: int) -> Way:
        """Makes stock's read between two engines whose blocks have so many tokens."""
        agent, model = self.decode.agent, self.pair.model
        block_bytes = block_tokens * model.token_bytes // model.layers
        blocks = self.tokens // block_tokens
        sides = prepared(self.decode, model.layers * blocks, block_bytes)
        first = np.arange(model.layers)[:, None] * blocks
        ours, theirs = (
            (first + np.random.default_rng(seed).permutation(blocks)).reshape(-1) for seed in (5, 0)
        )

        def run() -> int:
            handle = agent.make_prepped_xfer("READ", sides[0], ours, sides[1], theirs, b"")
            wait_for_transfer(agent, handle)
            return ours.size

        return run

    def bound(self, like: Way) -> int:
        """Reads as stock does, while as many bytes are copied; on a device copies alone."""
        if self.decode.memory.device.type != "cpu":
            from_here, to = self.decode.memory[: 2 * self.total_bytes].chunk(2)
            to.copy_(from_here)
            wait_for(to)
            return 0
        source = np.ones(_COPY_BYTES, dtype=np.uint8)
        target = np.ones_like(source)
        reading = threading.Thread(target=like)
        reading.start()
        for _ in range(-(-self.total_bytes // _COPY_BYTES)):
            np.copyto(target, source)
        reading.join()
        return 0

    def background(self, *, is_direct: bool) -> BackgroundRead:
        """Makes a read in the progress thread, as a worker's; it is not started."""
        copies = [copy for overlap in self.overlaps for copy in overlap.copies]
        share = Share(self.segments(), self.overlaps)
        read = StagedRead(
            ProgressAgent(self.landing, self.gate), self.pool, self.caches, self.decode.ends,
            b"read",
            plan_parts([(self.segments(), copies)] if is_direct else []),
            plan_chunks([] if is_direct else [share], self.pool.chunk_bytes),
        )  # fmt: skip
        return BackgroundRead(read, self.thread)

    def in_thread(self, *, is_direct: bool) -> int:
        """Reads by the progress thread alone; the loop only polls it."""
        read = self.background(is_direct=is_direct)
        read.start()
        while (state := read.state()) == "PROC":
            time.sleep(_LOOK_SECONDS)
        if state != "DONE":
            raise RuntimeError(f"a read ended as {state}")
        self.behind_seconds = time.perf_counter() - self.landing.landed
        return read.telemetry().descCount

    def check(self, ways: Mapping[str, Way]) -> None:
        """Runs each way; those that are kvpatch's have to bring P's bytes."""
        for way, run in ways.items():
            self.decode.memory.copy_(noise(self.decode.memory.numel(), 2))
            run()
            if way in ("direct", "staged"):
                self._compare()

    def _compare(self) -> None:
        source = noise(self.decode.memory.numel(), 1).numpy()
        target = self.decode.memory.cpu().numpy()
        place = {"remote": self.decode.remote_address, "local": self.decode.memory.data_ptr()}
        at = np.arange(self.tokens)
        for theirs, ours in zip(self.remote, self.local, strict=True):
            wanted = as_array(theirs, source, place["remote"])[
                self.remote_ids[at // self.pair.remote_tokens], :, at % self.pair.remote_tokens
            ]
            found = as_array(ours, target, place["local"])[
                self.local_ids[at // self.pair.local_tokens], :, at % self.pair.local_tokens
            ]
            if not np.array_equal(wanted, found):
                raise SystemExit(f"{self.pair}: {ours} is not what P holds")


def progress_seconds() -> tuple[float, float]:
    """Returns how long kvpatch's threads have been on a processor, and waited for one."""
    spent = waited = 0
    for thread in threading.enumerate():
        if thread.name in ("kvpatch-reads", "kvpatch-copies"):
            found = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
            spent, waited = spent + int(found[0]), waited + int(found[1])
    return spent / 1e9, waited / 1e9


def measure(pair: Pair, mib: int, repeat: int, decode: WorkerMemory) -> list[Measured]:
    """The rows of one pair; its ways take turns, so that a slow second slows all of them."""
    setup = Setup(pair, pair.tokens_in(mib * 1024**2), decode)
    costs = HOST_MEMORY if decode.memory.device.type == "cpu" else DEVICE_MEMORY
    auto = "direct" if is_direct(setup.overlaps[0], setup.segments(), costs) else "staged"
    ways: dict[str, Way] = {"stock, both like P": setup.like(pair.remote_tokens)}
    ways |= {
        "bound": partial(setup.bound, ways["stock, both like P"]),
        "direct": partial(setup.in_thread, is_direct=True),
        "staged": partial(setup.in_thread, is_direct=False),
    }
    setup.check(ways)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    descriptors = {}
    worked: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    behind: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeat):
        for way, run in ways.items():
            before = progress_seconds()
            started = time.perf_counter()
            descriptors[way] = run()
            seconds[way].append(time.perf_counter() - started)
            behind[way].append(setup.behind_seconds)
            after = progress_seconds()
            worked[way].append((after[0] - before[0], after[1] - before[1]))

    def beside(anchor: str, way: str) -> float:
        pairs = zip(seconds[anchor], seconds[way], strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)

    return [
        Measured(
            pair.model.name,
            str(pair),
            f"{way} (auto)" if way == auto else way,
            statistics.median(seconds[way]),
            setup.total_bytes / statistics.median(seconds[way]) / 1e9,
            beside("stock, both like P", way),
            beside("bound", way),
            descriptors[way],
            statistics.median(working for working, _ in worked[way]),
            statistics.median(waiting for _, waiting in worked[way]),
            statistics.median(behind[way]) if way in ("direct", "staged") else 0.0,
        )
        for way in ways
    ]


def table(rows: list[Measured]) -> Published:
    """Makes a row for each pair: what stock reads between like engines, and both of our ways."""
    pairs: dict[str, dict[str, Measured]] = {}
    for row in rows:
        pairs.setdefault(row.pair, {})[row.way.removesuffix(" (auto)")] = row
    shown = []
    for pair, found in pairs.items():
        stock, direct, staged = (found[way] for way in ("stock, both like P", "direct", "staged"))
        chosen = "direct" if direct.way.endswith("(auto)") else "staged"
        shown.append([
            pair, *(f"{way.gb_per_second:.1f}" for way in (stock, direct, staged)), chosen,
            f"{found[chosen].of_like_p:.2f}", f"{staged.of_bound:.2f}",
            f"{staged.working_seconds * 1e3:.0f} + {staged.waiting_seconds * 1e3:.0f}",
            f"{staged.behind_seconds * 1e3:.1f}",
        ])  # fmt: skip
    columns = ("P → D", "stock, like engines, GB/s", "direct", "staged", "read as",
               "of stock's", "staged, of its bound", "staged: works + waits, ms",
               "behind its last byte, ms")  # fmt: skip
    return Published("transfer", "experiments/bench_transfer.py", "", columns, shown)


def goals(rows: list[Measured]) -> list[Goal]:
    found = []
    for row in rows:
        if row.way.removesuffix(" (auto)") == "staged":
            name = f"{row.pair}, staged, of"
            found.append(Goal(f"{name} the bound", row.of_bound, 0.9, is_least=True))
            found.append(Goal(f"{name} stock's like read", row.of_like_p, 0.6, is_least=True))
            behind = row.behind_seconds * 1e3
            found.append(Goal(f"{row.pair}, ms behind the last byte", behind, 2, is_least=False))
    return found


def main() -> None:
    options = options_of(
        __doc__,
        mib=(128, "size of the request's cache"),
        repeat=(9, "turns of each row"),
        device=("cpu", "of both caches: cpu or cuda"),
        pairs=("", "numbers of pairs, by commas; all by default"),
    )
    console = console_of(150)
    kernel_thread.patience_seconds = 60.0  # what is measured is not the time until it is there
    size = 2 * options.mib * 1024**2
    rows: list[Measured] = []
    with (
        beside_prefill(options.device, size, THREADS) as decode,
        console.status("measuring") as status,
    ):
        numbers = [int(number) for number in options.pairs.split(",") if number]
        for pair in [PAIRS[number] for number in numbers] or PAIRS:
            status.update(f"{pair}")
            rows += measure(pair, options.mib, options.repeat, decode)
    conclude(rows, goals(rows), options, console, table(rows))


if __name__ == "__main__":
    main()
