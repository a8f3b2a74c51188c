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
from kvpatch.load.worker_staging_pool import staging_pool
from kvpatch.transfer.agent_gate import AgentGate, ProgressAgent
from kvpatch.transfer.background_read import BackgroundRead
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.unposted import Unposted
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
class Side:
    """One worker's cache: how it lies in memory, and tokens of a block."""

    layout: str
    block_tokens: int

    def views(self, memory: torch.Tensor, heads: int, channels: int) -> list[torch.Tensor]:
        """Returns each layer's tensor [block, head, token, channel], as far as a memory reaches."""
        block_bytes = _LAYERS * heads * self.block_tokens * channels * _ITEM.itemsize
        sizes = (memory.numel() // block_bytes, heads, self.block_tokens, channels)
        order = (0, 1, 2, 3) if self.layout == "HND" else (0, 2, 1, 3)
        count = _LAYERS * sizes[0] * block_bytes // _LAYERS
        flat = memory[:count].view(_ITEM).view(_LAYERS, *(sizes[axis] for axis in order))
        return [layer.permute(order) for layer in flat]  # either order is its own inverse


@dataclass(frozen=True)
class Pair:
    """P's cache and D's, of one model."""

    prefill: Side
    decode: Side
    heads: int = 4
    channels: int = 128
    dimension: str = "packed"

    def __str__(self) -> str:
        sides = [f"{side.layout} {side.block_tokens}" for side in (self.prefill, self.decode)]
        return " -> ".join(sides) + (", one latent" if self.dimension == "channel" else "")


def _pair(prefill: str, decode: str, **model: Any) -> Pair:
    sides = (text.split() for text in (prefill, decode))
    return Pair(*(Side(layout, int(tokens)) for layout, tokens in sides), **model)


_LATENT = {"heads": 1, "channels": 576, "dimension": "channel"}
PAIRS = (
    _pair("HND 64", "HND 64"),
    _pair("HND 128", "HND 32"),
    _pair("HND 32", "HND 128"),
    _pair("HND 96", "HND 64"),
    _pair("NHD 64", "HND 64"),
    _pair("HND 128", "NHD 16"),
    _pair("HND 128", "HND 32", **_LATENT),
)


@dataclass(frozen=True)
class Compared:
    """What became of one pair, read in one way.

    Attributes:
        seconds: of the second of two reads.
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
    place = _device(device)
    with _beside_prefill(device) as (connection, agent):
        decode = _Decode(place, agent, connection)
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


def _device(name: str) -> torch.device:
    if name not in DEVICES:
        raise BadOptions(f"--device is {name!r}", f"give one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadOptions(
            f"torch {torch.__version__} finds no CUDA device here",
            "run this where the engines run, with their Python, or with --device cpu",
        )
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _noise(seed: int) -> torch.Tensor:
    numbers = np.random.default_rng(seed).integers(0, 256, _CACHE_BYTES, dtype=np.uint8)
    return torch.from_numpy(numbers)


def _agent(name: str) -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise BadOptions(f"NIXL cannot be imported: {error}", "run this where vLLM is") from error
    return nixl_agent(name, nixl_agent_config(num_threads=1, capture_telemetry=True))


def _registered(agent: Any, device: torch.device, seed: int) -> torch.Tensor:
    """Returns a cache's memory, full of noise."""
    memory = _noise(seed).to(device)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    kind = tensor_facts(memory).memory
    place = (memory.data_ptr(), memory.numel(), kind.device_id, "")
    agent.register_memory([place], kind.kind)
    return memory


def _prefill(connection: Connection, device: str) -> None:
    """Holds P's cache until D says that it has read all, or is gone."""
    agent = _agent("kvpatch-verify-P")
    memory = _registered(agent, _device(device), seed=1)
    connection.send((agent.get_agent_metadata(), memory.data_ptr()))
    connection.poll(None)


@contextmanager
def _beside_prefill(device: str) -> Iterator[tuple[Connection, Any]]:
    """While inside, P's process holds a cache; yields its end of a pipe, and D's agent."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_prefill, args=(theirs, device), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, _agent("kvpatch-verify-D")
    finally:
        ours.close()
        process.join(_SECONDS)
        process.kill()


class _Decode:
    """D's process: its cache, and what reads into it."""

    def __init__(self, device: torch.device, agent: Any, connection: Connection) -> None:
        self._device = device
        self._memory = _registered(agent, device, seed=2)
        if not connection.poll(_SECONDS):
            raise EngineFailed(f"P's process said nothing for {_SECONDS:g} s: see its output above")
        try:
            metadata, self._remote_address = connection.recv()
        except EOFError:
            raise EngineFailed("P's process has ended: see its output above") from None
        name = agent.add_remote_agent(metadata)
        kind = tensor_facts(self._memory).memory
        self._ends = Ends(kind, kind, name.decode() if isinstance(name, bytes) else name)
        self._pool = staging_pool(agent, kind, device)
        gate = AgentGate()
        self.thread = ProgressThread(self._pool, device, gate)
        self._agent = ProgressAgent(agent, gate)

    def compare(self, pair: Pair, way: str) -> Compared:
        """Reads a request of a pair twice, and compares the whole cache."""
        remote, local = _noise(1), _noise(2)
        order = np.random.default_rng(0).permutation
        blocks = [
            BlockList(
                order(views[0].shape[0])[: -(-_TOKENS // side.block_tokens)], side.block_tokens
            )
            for side, views in self._sides(pair, remote, local)
        ]
        expected = self._expected(pair, remote, local, blocks)
        for _ in range(2):
            self._memory.copy_(_noise(2))
            seconds = self._read(pair, way, blocks)
        found = self._memory.cpu()
        wrong = int((found != expected).sum())
        found[-1] ^= 1
        token_bytes = _LAYERS * pair.heads * pair.channels * _ITEM.itemsize
        notices = int((found != expected).sum()) != wrong
        return Compared(str(pair), way, _TOKENS * token_bytes, seconds, wrong, notices)

    @staticmethod
    def _sides(
        pair: Pair, remote: torch.Tensor, local: torch.Tensor
    ) -> list[tuple[Side, list[torch.Tensor]]]:
        """Returns both sides with their layers in these memories, P's first."""
        memories = ((pair.prefill, remote), (pair.decode, local))
        return [(side, side.views(memory, pair.heads, pair.channels)) for side, memory in memories]

    def _expected(
        self, pair: Pair, remote: torch.Tensor, local: torch.Tensor, blocks: Sequence[BlockList]
    ) -> torch.Tensor:
        """Returns what D's cache is to hold, by torch's indexing; behind the last token zeroes."""
        (_, theirs), (side, ours) = self._sides(pair, remote, local)
        of, into = (torch.from_numpy(one.block_ids) for one in blocks)
        for there, here in zip(theirs, ours, strict=True):
            rows = there[of].transpose(1, 2).reshape(-1, pair.heads, pair.channels)[:_TOKENS]
            whole = rows.new_zeros((into.numel() * side.block_tokens, *rows.shape[1:]))
            whole[:_TOKENS] = rows
            by_block = whole.view(-1, side.block_tokens, *rows.shape[1:])
            here[into] = by_block.transpose(1, 2)
        return local

    def _read(self, pair: Pair, way: str, blocks: Sequence[BlockList]) -> float:
        """Reads the request as a worker does; returns how long that took."""
        # P's memory is at another address: its planes are those of a memory of the same size.
        at = _noise(1)
        remote = [
            [
                replace(
                    plane,
                    address=plane.address - at.data_ptr() + self._remote_address,
                    memory=self._ends.remote,
                )
                for plane in planes
            ]
            for planes in _planes(pair.prefill.views(at, pair.heads, pair.channels), pair)
        ]
        layers = pair.decode.views(self._memory, pair.heads, pair.channels)
        local = [plane for planes in _planes(layers, pair) for plane in planes]
        overlaps = overlaps_of(remote, local)
        segments = pair_blocks(*blocks, 0, _TOKENS)
        copies = [copy for overlap in overlaps for copy in overlap.copies]
        staged = [Share(segments, overlaps)] if way == "staged" else []
        caches = Caches({str(number): layer for number, layer in enumerate(layers)})
        caches.thread = self.thread.copying
        read = StagedRead(
            self._agent,
            self._pool,
            caches,
            self._ends,
            b"",
            Unposted(
                plan_parts([(segments, copies)] if way == "direct" else []),
                plan_chunks(staged, lambda: self._pool.chunk_bytes(is_paced=True)),
            ),
            is_paced=True,
        )
        read.tails = lambda: [(local, uncovered_tail(blocks[1], _TOKENS))]
        return self._finish(BackgroundRead(read, self.thread), f"{pair}, {way}")

    def _finish(self, read: BackgroundRead, name: str) -> float:
        began = time.monotonic()
        read.start()
        while (state := read.state()) == "PROC" and time.monotonic() < began + _SECONDS:
            time.sleep(_LOOK_SECONDS)
        if state != "DONE":
            raise EngineFailed(f"{name}: a read is {state} after {time.monotonic() - began:.0f} s")
        seconds = time.monotonic() - began
        read.release()
        return seconds


def _planes(layers: Sequence[torch.Tensor], pair: Pair) -> list[list[Plane]]:
    order = DimensionOrder(("block", "head", "token", pair.dimension))
    return [
        list(read_planes(str(number), tensor_facts(layer), order))
        for number, layer in enumerate(layers)
    ]
