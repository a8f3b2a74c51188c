"""What kvpatch asks of a GPU, on the GPU, against what it does in host memory: ``pytest -m gpu``.

Without a GPU the same is played with two memories of the host's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvpatch.checks.cache_digests import memories_of
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Memory, Plane
from kvpatch.geometry.segments import BlockList, pair_blocks, uncovered_tail
from kvpatch.geometry.staged_plan import Chunk, Share, plan_chunks
from kvpatch.host_buffer.host_pool import HostPool, forget_last_error
from kvpatch.transfer import kernel_thread
from kvpatch.transfer.agent_gate import AgentGate
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staging_pool import StagingPool
from tests.geometry.slow_digests import as_numbers
from tests.geometry.whole_caches import CacheSizes, named_layout
from tests.on_gpu import GPU

from .digest_world import digested

pytestmark = [pytest.mark.patching, pytest.mark.usefixtures("untried")]

LAYOUTS = ("HND", "NHD", "HND_in_block", "NHD_in_block", "LBHNC", "LBNHC", "BLHNC", "CPU_packed")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
ON_GPU = [pytest.param("cuda", marks=GPU)]


class World:
    """A random pair of caches: P's bytes, and D's cache on the host and on a device."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng = rng = np.random.default_rng(seed)
        tokens = int(rng.integers(1, 500))
        block_tokens = [int(rng.choice([1, 8, 16, 48, 64, 96, 128])) for _ in "PD"]
        held = [-(-tokens // one) for one in block_tokens]
        shape = int(rng.integers(1, 6)), int(rng.choice([1, 2, 8]))
        row = int(rng.choice([8, 64, 128])), int(rng.choice([1, 2, 4]))
        sizes = [
            CacheSizes(shape[0], count + 3, shape[1], one, *row)
            for count, one in zip(held, block_tokens, strict=True)
        ]
        self.layouts = [str(rng.choice(LAYOUTS)) for _ in "PD"]
        self.source = rng.integers(0, 256, sizes[0].total_bytes(), dtype=np.uint8)
        host = torch.from_numpy(rng.integers(0, 256, sizes[1].total_bytes(), dtype=np.uint8))
        self.memories = [host, host.clone().to(device)]
        self.blocks = [
            BlockList(rng.permutation(count + 3)[:count], one)
            for count, one in zip(held, block_tokens, strict=True)
        ]
        self.tokens = tokens
        remote = named_layout(self.layouts[0]).planes(
            sizes[0], self.source.ctypes.data, Memory("DRAM")
        )
        by_layer: dict[str, list[Plane]] = {}
        for plane in remote:
            by_layer.setdefault(plane.layer, []).append(plane)
        layout = named_layout(self.layouts[1])
        self.local = [
            layout.planes(sizes[1], memory.data_ptr(), Memory("DRAM")) for memory in self.memories
        ]
        segments = pair_blocks(*self.blocks, 0, tokens)
        self.overlaps = [overlaps_of(list(by_layer.values()), local) for local in self.local]
        self.shares = [Share(segments, one) for one in self.overlaps]
        self.said = f"seed {seed}: {self.layouts}, blocks of {block_tokens}, {tokens} tokens"

    def chunks(self, side: int) -> Iterator[Chunk]:
        """In a size by chance."""
        least = max(overlap.staged_bytes for overlap in self.overlaps[side])
        return plan_chunks([self.shares[side]], max(least, 1 << 18))

    def landed(self, chunk: Chunk) -> torch.Tensor:
        """A chunk's buffer as NIXL fills it."""
        buffer = np.zeros(chunk.buffer_bytes, dtype=np.uint8)
        places = zip(chunk.remote_address, chunk.staging_offset, chunk.length, strict=True)
        for address, offset, length in places:
            start = int(address) - self.source.ctypes.data
            buffer[offset : offset + length] = self.source[start : start + length]
        return torch.from_numpy(buffer)

    def place(self, side: int) -> None:
        """All of the request, and zeroes behind it."""
        memory, local = self.memories[side], self.local[side]
        caches = Caches({plane.layer: memory for plane in local})
        after = caches.mark()
        tail = uncovered_tail(self.blocks[1], self.tokens)
        copies = [caches.zero([(local, tail)], after)] if len(tail) else []
        kept = []
        for chunk in self.chunks(side):
            kept.append(self.landed(chunk).to(memory.device))
            copies.append(caches.place(kept[-1], chunk.placements, after))
        while not all(is_over() for is_over in copies):
            pass


@pytest.mark.parametrize("device", DEVICES)
def test_random_pairs_are_placed_as_in_host_memory(device: str) -> None:
    for seed in range(60 if device == "cuda" else 8):
        world = World(seed, device)
        before = world.memories[0].clone()
        for side in (0, 1):
            world.place(side)
        assert torch.equal(world.memories[0], world.memories[1].cpu()), world.said
        assert not torch.equal(world.memories[0], before), "negative control"


@pytest.mark.parametrize("device", DEVICES)
def test_random_caches_have_the_digests_of_host_memory(device: str) -> None:
    for seed in range(40 if device == "cuda" else 6):
        world = World(seed, device)
        found = []
        for memory, local in zip(world.memories, world.local, strict=True):
            memories = memories_of({p.layer: memory for p in local})
            digests = digested(memories, local, world.blocks[1], 16, (0, world.tokens))
            found.append(as_numbers(digests))
        assert found[0] == found[1], world.said


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_saved_to_pinned_memory(device: str) -> None:
    flat = torch.arange(5 * 64 * 4 * 16, dtype=torch.int32).view(5, 64, 4, 16).to(device)
    tensors = {f"layer.{n}": flat[n] for n in range(5)}
    pool = HostPool(tensors, dict.fromkeys(tensors, 0), 64, 24)
    order = np.random.default_rng(0).permutation
    of, into = order(64)[:17].tolist(), order(24)[:17].tolist()
    pool.save(of, into)
    pool.settle()
    for layer, tensor in tensors.items():
        assert torch.equal(pool.tensors[layer][into], tensor.cpu()[of])
        assert pool.tensors[layer].is_pinned() == (device == "cuda")


@pytest.mark.parametrize("device", ON_GPU)
def test_the_kernels_are_what_places_and_digests(device: str) -> None:
    world = World(3, device)
    world.place(1)
    memories = memories_of({plane.layer: world.memories[1] for plane in world.local[1]})
    digested(memories, world.local[1], world.blocks[1], 16, (0, world.tokens))
    tried = {kind: trial.result() for (_, kind), trial in kernel_thread._tried.items()}
    assert {kind[0] for kind in tried if isinstance(kind, tuple)} == {"placing", "digests"}
    assert all(tried.values())


@pytest.mark.parametrize("device", ON_GPU)
def test_the_thread_that_reads_has_a_context(device: str) -> None:
    """Negative control: a thread that has asked for nothing has none."""
    cuda, found = ctypes.CDLL("libcuda.so.1"), []
    torch.zeros(1, device=device)
    thread = ProgressThread(
        StagingPool(1, lambda _: torch.empty(0)), torch.device(device, 0), AgentGate()
    )

    def look() -> None:
        context = ctypes.c_void_p()
        cuda.cuCtxGetCurrent(ctypes.byref(context))
        found.append(bool(context.value))

    def read() -> None:
        look()
        with thread._as_the_engine():
            look()

    one = threading.Thread(target=read)
    one.start()
    one.join()
    assert found == [False, True]


@pytest.mark.parametrize("device", ON_GPU)
def test_an_error_of_pinning_does_not_reach_the_next_launch(device: str) -> None:
    memory = torch.from_numpy(np.zeros(1 << 20, dtype=np.uint8))
    runtime: Any = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0
    assert int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) != 0, "twice"
    forget_last_error(torch.device(device))
    assert torch.ones(8, device=device).add_(1).sum().item() == 16
    runtime.cudaHostUnregister(memory.data_ptr())


@pytest.mark.parametrize("device", ON_GPU)
def test_copies_come_after_steps_before_and_wait_for_none_behind(device: str) -> None:
    world = World(3, device)
    memory, local = world.memories[1], world.local[1]
    before = memory.clone()
    caches = Caches({plane.layer: memory for plane in local})
    buffers = [(world.landed(chunk).to(device), chunk) for chunk in world.chunks(1)]
    torch.cuda.synchronize()

    torch.cuda._sleep(100_000_000)
    seen = memory.clone()  # by a step that was queued before the read
    begun = caches.mark()
    torch.cuda._sleep(2_000_000_000)
    later = torch.cuda.Event()
    later.record()
    copies = [caches.place(buffer, chunk.placements, begun) for buffer, chunk in buffers]
    while not all(is_over() for is_over in copies):
        pass
    assert not later.query(), "the steps behind it are not waited for"
    torch.cuda.synchronize()
    assert torch.equal(seen, before)
    assert not torch.equal(memory, before)
