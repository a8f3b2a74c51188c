"""Two workers' caches on this machine's own memory, compared byte by byte: no engine, no model.

Two processes hold a cache each, in host memory or on a GPU, and a NIXL agent. D reads P's blocks
into blocks of another size or layout by what reads them in an engine: the plans, the thread that
reads, the staging pool, the copies on the device. What D then holds is compared with what torch's
own indexing makes of P's bytes, in the whole cache: a byte that was written beside the request is
found too.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvpatch.core.errors import BadOptions, EngineFailed
from kvpatch.geometry.dimension_order import DimensionOrder
from kvpatch.geometry.direct_plan import plan_parts
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.planes_of_tensors import read_planes
from kvpatch.geometry.segments import BlockList, pair_blocks, uncovered_tail
from kvpatch.geometry.staged_plan import Share, plan_chunks
from kvpatch.load.heterogeneous_reads import staging_pool
from kvpatch.transfer import kernel_thread
from kvpatch.transfer.agent_gate import AgentGate, ProgressAgent
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.progress_thread import BackgroundRead, ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.worker.registered_caches import tensor_facts

if TYPE_CHECKING:
    from rich.table import Table

DEVICES = ("cpu", "cuda")
WAYS = ("direct", "staged")

_LAYERS = 4
_TOKENS = 1000
_CACHE_BYTES = 16 * 1024**2
_ITEM = torch.int16
#: Of P's start, which imports torch, and of one read.
_SECONDS = 60.0
_LOOK_SECONDS = 1e-4


@dataclass(frozen=True)
class CacheSide:
    """One worker's cache: how it lies in memory, and tokens of a block."""

    layout: str
    block_tokens: int

    def __str__(self) -> str:
        return f"{self.layout} {self.block_tokens}"

    def views(self, memory: torch.Tensor, heads: int, channels: int) -> list[torch.Tensor]:
        """Returns each layer's tensor [block, head, token, channel], as far as a memory reaches."""
        row = _ITEM.itemsize * _LAYERS * heads * self.block_tokens * channels
        blocks = memory.numel() // row
        sizes = blocks, heads, self.block_tokens, channels
        order = (0, 1, 2, 3) if self.layout == "HND" else (0, 2, 1, 3)
        flat = memory[: blocks * row].view(_ITEM).view(_LAYERS, *(sizes[axis] for axis in order))
        return [layer.permute(order) for layer in flat]  # either order is its own inverse


@dataclass(frozen=True)
class CachePair:
    """P's cache and D's, of one model; the channels are of keys and values together."""

    prefill: CacheSide
    decode: CacheSide
    heads: int = 4
    channels: int = 128

    def __str__(self) -> str:
        model = "" if self.heads > 1 else f", one head of {self.channels}"
        return f"{self.prefill} -> {self.decode}{model}"


PAIRS = (
    CachePair(CacheSide("HND", 64), CacheSide("HND", 64)),
    CachePair(CacheSide("HND", 128), CacheSide("HND", 32)),
    CachePair(CacheSide("HND", 32), CacheSide("HND", 128)),
    CachePair(CacheSide("HND", 96), CacheSide("HND", 64)),
    CachePair(CacheSide("NHD", 64), CacheSide("HND", 64)),
    CachePair(CacheSide("HND", 128), CacheSide("NHD", 16)),
    CachePair(CacheSide("HND", 128), CacheSide("HND", 32), heads=1, channels=576),
)


@dataclass(frozen=True)
class Compared:
    """The result of one pair, read along one path.

    Attributes:
        seconds: the time of the second of two reads.
        notices: True if one flipped bit in D's cache was found.
    """

    pair: str
    way: str
    bytes: int
    seconds: float
    wrong_bytes: int
    notices: bool

    @property
    def is_right(self) -> bool:
        """True if all bytes are where they belong, and a wrong one would have been found."""
        return not self.wrong_bytes and self.notices


def compare_workers(device: str) -> list[Compared]:
    """Reads every pair in both ways, and compares.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        BadOptions: there is no such device, or no NIXL.
        EngineFailed: a process or a read did not come to an end.
    """
    with beside_prefill(device, _CACHE_BYTES) as own:
        decode = _Decode(own)
        found = [decode.compare(pair, way) for pair in PAIRS for way in WAYS]
        decode.thread.stop()
    return found


def table_of(found: Sequence[Compared], device: str) -> Table:
    """Returns one row for each pair and way."""
    from rich.table import Table

    name = torch.cuda.get_device_name() if device == "cuda" else "host memory"
    table = Table("P -> D", "way", "MiB", "GB/s", "bytes", title=f"two workers, {name}")
    for one in found:
        said = f"{one.wrong_bytes} wrong" if one.wrong_bytes else "identical"
        said = said if one.notices else "a flipped bit was not noticed"
        rate = one.bytes / one.seconds / 1e9
        table.add_row(one.pair, one.way, f"{one.bytes / 2**20:.0f}", f"{rate:.2f}", said)
    return table


def noise(size: int, seed: int) -> torch.Tensor:
    """Returns random bytes, so that a byte in the wrong place shows."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


class WorkerMemory:
    """One process's memory, full of noise, and its NIXL agent, which knows it.

    Args:
        threads: of the agent.

    Raises:
        BadOptions: there is no NIXL.
    """

    def __init__(self, name: str, device: str, size: int, seed: int, threads: int) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise BadOptions(
                f"NIXL cannot be imported: {error}", "run this where vLLM is"
            ) from error
        config = nixl_agent_config(num_threads=threads, capture_telemetry=True)
        self.agent: Any = nixl_agent(name, config)
        self.memory = noise(size, seed).to(device)
        if self.memory.device.type != "cpu":
            torch.get_device_module(self.memory.device).synchronize()
        self.kind = tensor_facts(self.memory).memory
        place = (self.memory.data_ptr(), size, self.kind.device_id, "")
        self.agent.register_memory([place], self.kind.kind)
        self.remote_address = 0
        self.ends = Ends(self.kind, self.kind, "")

    def meet(self, connection: Connection) -> None:
        """Takes the other process's agent and address, for a memory of the same kind and size."""
        try:
            if not connection.poll(_SECONDS):
                raise EOFError
            metadata, self.remote_address = connection.recv()
        except EOFError:
            raise EngineFailed("P's process has ended or hangs: see its output above") from None
        name = self.agent.add_remote_agent(metadata)
        self.ends = Ends(*self.ends[:2], name.decode() if isinstance(name, bytes) else name)


def hold_prefill(connection: Connection, device: str, size: int, threads: int) -> None:
    """Holds P's cache until D says that it has read all, or is gone."""
    held = WorkerMemory("kvpatch-verify-P", device, size, 1, threads)
    connection.send((held.agent.get_agent_metadata(), held.memory.data_ptr()))
    connection.poll(None)


@contextmanager
def beside_prefill(device: str, size: int, threads: int = 1) -> Iterator[WorkerMemory]:
    """Yields D's memory, while another process holds one as large.

    Raises:
        BadOptions: there is no such device, or no NIXL.
        EngineFailed: the other process did not start.
    """
    if device not in DEVICES:
        raise BadOptions(f"--device is {device!r}", f"give one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadOptions(
            f"torch {torch.__version__} finds no CUDA device here",
            "run this where the engines run, with their Python, or with --device cpu",
        )
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    arguments = (theirs, device, size, threads)
    process = context.Process(target=hold_prefill, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        decode = WorkerMemory("kvpatch-verify-D", device, size, 2, threads)
        decode.meet(ours)
        yield decode
    finally:
        ours.close()
        process.join(_SECONDS)
        process.kill()


class _Decode:
    """D's process: its cache, and what reads into it."""

    def __init__(self, own: WorkerMemory) -> None:
        self._own, self._memory = own, own.memory
        kernel_thread.patience_seconds = _SECONDS  # it is the kernels' bytes that are compared
        # As P has it, and D.
        self._remote, self._before = noise(_CACHE_BYTES, 1), noise(_CACHE_BYTES, 2)
        self._pool = staging_pool(own.agent, own.kind, own.memory.device)
        gate = AgentGate()
        self.thread = ProgressThread(self._pool, own.memory.device, gate)
        self._agent = ProgressAgent(own.agent, gate)

    def compare(self, pair: CachePair, way: str) -> Compared:
        """Reads a request of a pair twice, and compares the whole cache."""
        expected = self._before.clone()
        theirs = pair.prefill.views(self._remote, pair.heads, pair.channels)
        ours = pair.decode.views(expected, pair.heads, pair.channels)
        draw = np.random.default_rng(0).permutation
        blocks = [
            BlockList(draw(views[0].shape[0])[: -(-_TOKENS // size)], size)
            for views, size in (
                (theirs, pair.prefill.block_tokens),
                (ours, pair.decode.block_tokens),
            )
        ]
        _write_expected(theirs, ours, blocks)
        for _ in range(2):
            self._memory.copy_(self._before)
            seconds = self._read(pair, way, blocks)
        found = self._memory.cpu()
        wrong = int((found != expected).sum())
        found[-1] ^= 1
        notices = int((found != expected).sum()) != wrong
        token_bytes = _LAYERS * pair.heads * pair.channels * _ITEM.itemsize
        return Compared(str(pair), way, _TOKENS * token_bytes, seconds, wrong, notices)

    def _read(self, pair: CachePair, way: str, blocks: Sequence[BlockList]) -> float:
        """Reads the request as a worker does; returns how long that took."""
        layers = pair.decode.views(self._memory, pair.heads, pair.channels)
        local = [plane for planes in _planes(layers) for plane in planes]
        overlaps = overlaps_of(self._remote_planes(pair), local)
        segments = pair_blocks(blocks[0], blocks[1], 0, _TOKENS)
        copies = [copy for overlap in overlaps for copy in overlap.copies]
        staged = [Share(segments, overlaps)] if way == "staged" else []
        caches = Caches({str(number): layer for number, layer in enumerate(layers)})
        caches.thread = self.thread.copying
        direct = plan_parts([(segments, copies)] if way == "direct" else [])
        chunks = plan_chunks(staged, self._pool.chunk_bytes)
        paced = StagedRead(self._agent, self._pool, caches, self._own.ends, b"", direct, chunks)
        paced.tails = lambda: [(local, uncovered_tail(blocks[1], _TOKENS))]
        read = BackgroundRead(paced, self.thread)
        began = time.monotonic()
        read.start()
        while (state := read.state()) == "PROC" and time.monotonic() < began + _SECONDS:
            time.sleep(_LOOK_SECONDS)
        seconds = time.monotonic() - began
        if state != "DONE":
            raise EngineFailed(f"{pair}, {way}: a read is {state} after {seconds:.0f} s")
        read.release()
        return seconds

    def _remote_planes(self, pair: CachePair) -> list[list[Plane]]:
        """Returns P's planes, layer by layer: those of a memory like it, at P's address."""
        apart = self._own.remote_address - self._remote.data_ptr()
        layers = _planes(pair.prefill.views(self._remote, pair.heads, pair.channels))
        memory = self._own.ends.remote
        return [
            [replace(one, address=one.address + apart, memory=memory) for one in planes]
            for planes in layers
        ]


def _write_expected(
    theirs: Sequence[torch.Tensor], ours: Sequence[torch.Tensor], blocks: Sequence[BlockList]
) -> None:
    """Writes what D is to hold, by torch's indexing; behind the last token zeroes."""
    of, into = (torch.from_numpy(one.block_ids) for one in blocks)
    for there, here in zip(theirs, ours, strict=True):
        _, heads, size, channels = here.shape
        rows = there[of].transpose(1, 2).reshape(-1, heads, channels)[:_TOKENS]
        whole = rows.new_zeros((into.numel() * size, heads, channels))
        whole[:_TOKENS] = rows
        here[into] = whole.view(-1, size, heads, channels).transpose(1, 2)


def _planes(layers: Sequence[torch.Tensor]) -> list[list[Plane]]:
    order = DimensionOrder(("block", "head", "token", "packed"))
    return [
        list(read_planes(str(number), tensor_facts(layer), order))
        for number, layer in enumerate(layers)
    ]
