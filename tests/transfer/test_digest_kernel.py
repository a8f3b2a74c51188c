"""Triton's kernel for digests: the sums that Triton's interpreter comes to, and that it compiles.

The interpreter runs the kernel's own code on a CPU. Here nothing runs on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.checks.cache_digests import TableTokens, memories_of, sums_of
from kvpatch.checks.digest_pieces import Alike, DigestPiece
from kvpatch.checks.digests import Weights
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides
from kvpatch.geometry.segments import BlockList
from kvpatch.transfer import kernel_thread
from kvpatch.transfer.one_memory import storage_of
from tests.geometry.interpreted_kernel import compiled, interpreted_kernel
from tests.geometry.test_tiles import rows_of

from .digest_world import SEED, Engine, Rank, as_whole, request_of
from .test_cache_digests import worlds
from .test_tiles import held

pytestmark = pytest.mark.patching


@pytest.fixture
def kernel() -> ModuleType:
    return digest_kernel()


def digest_kernel() -> ModuleType:
    interpreted_kernel()  # which it imports
    return interpreted_kernel("kvpatch.checks.digest_kernel")


@pytest.fixture(autouse=True)
def fast_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the interpreter add up by numpy: what it does not know it does item by item."""
    standard = pytest.importorskip("triton.language").standard
    monkeypatch.setattr(standard, "_sum_combine", digest_kernel()._plus)


def assert_sums(
    memory: torch.Tensor,
    planes: Sequence[Plane],
    blocks: BlockList,
    extent: tuple[int, int],
    range_tokens: int = 16,
) -> None:
    """Each piece has the sums by the kernel that it has on the host."""
    memories = memories_of(dict.fromkeys((plane.layer for plane in planes), memory))
    table = TableTokens({}, memories, tuple(planes), blocks, 0, extent[1])
    for alike in table.alike():
        pieces = list(table.pieces(alike, [extent], range_tokens, Weights(SEED)))
        for piece in pieces:
            assert torch.equal(digest_kernel().sums_by_kernel(piece), piece.sums_by_torch())
        assert all(map(digest_kernel()._is_right_for, pieces[:1])), "the trial of this kind"


@settings(max_examples=15, deadline=None)
@given(worlds(), st.booleans())
def test_any_cache_has_the_sums_that_it_has_on_the_host(world, is_whole):
    request, ranks, range_tokens = world
    for rank in ranks:
        engine = Engine(request, rank)
        planes = [as_whole(plane) if is_whole else plane for plane in engine.planes]
        extent = engine.end_token // 3, engine.end_token
        assert_sums(engine.memory, planes, engine.blocks, extent, range_tokens)


def test_more_heads_than_one_program_sums(kernel: ModuleType) -> None:
    engine = Engine(request_of(layers=1, heads=10, tokens=40), Rank("NHD", heads=range(10)))
    assert_sums(engine.memory, engine.planes, engine.blocks, (5, 40))


@pytest.mark.parametrize("range_tokens", [16, 40])
def test_tiles(kernel: ModuleType, range_tokens: int) -> None:
    memory, planes = held(KeyOrder.TILED, rows_of(1, 64))
    assert_sums(memory, planes, BlockList(np.array([4, 1, 5]), 64), (3, 150), range_tokens)


@pytest.mark.parametrize("size_bytes", [4 * 1024, 10_002, 33_333])
def test_a_recurrent_state_of_many_rows(kernel: ModuleType, size_bytes: int) -> None:
    memory = torch.arange(4 * size_bytes).mul(7).to(torch.uint8)
    counts, strides = Counts(4, 1, 1, size_bytes), Strides(size_bytes, size_bytes, size_bytes, 1)
    plane = Plane("", Content.STATE, memory.data_ptr(), strides, counts, 1, 0, Memory("DRAM"))
    assert_sums(memory, [plane], BlockList(np.array([2]), 1), (0, 1))


def test_blocks_beyond_2_gib(kernel: ModuleType) -> None:
    """Of a cache of 12 GiB, of which three blocks are ever touched."""
    block_bytes, blocks = 4096, 3 * 2**20
    memory = torch.empty(block_bytes * blocks, dtype=torch.uint8)
    counts, strides = Counts(blocks, 1, 16, 128), Strides(block_bytes, block_bytes, 256, 2)
    plane = Plane("", Content.KEY, memory.data_ptr(), strides, counts, 2, 0, Memory("DRAM"))
    ids = np.array([blocks - 1, 2**19 + 1, 0])
    for number in ids.tolist():
        memory[number * block_bytes :][:block_bytes] = torch.arange(block_bytes) + number
    assert_sums(memory, [plane], BlockList(ids, 16), (0, 48))


def some_piece(seed: int = 1, layout: str = "HND") -> DigestPiece:
    engine = Engine(request_of(layers=1, tokens=40), Rank(layout, seed=seed))
    memories = dict.fromkeys((p.layer for p in engine.planes), storage_of(engine.memory))
    table = TableTokens({}, memories, tuple(engine.planes), engine.blocks, 0, 40)
    (alike,) = table.alike()
    return next(table.pieces(alike, [(0, 40)], 16, Weights(SEED)))


def test_one_wrong_bit_is_seen(kernel: ModuleType) -> None:
    """Negative control of the comparison."""
    piece = some_piece()
    before = kernel.sums_by_kernel(piece)
    number = int(piece.numbers[0, 0]) * piece.alike.step
    piece.alike.memory.memory[number + 5] ^= 64
    assert (kernel.sums_by_kernel(piece) != before).sum() == 1


class AsCuda:
    """Fake: a host's memory that says that it is CUDA's."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self.device = memory, self

    type = "cuda"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def test_a_device_with_triton_uses_it(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[DigestPiece] = []
    monkeypatch.setattr(kernel, "sums_surely", used.append)
    piece = some_piece()
    alike = Alike(piece.alike.memory, piece.alike.planes)
    alike.memory = alike.memory._replace(memory=AsCuda(alike.memory.memory))

    sums_of(piece)
    assert not used, "negative control: memory of the host"
    on_device = piece._replace(alike=alike)
    sums_of(on_device)
    assert used == [on_device]


@pytest.fixture
def sums(kernel: ModuleType, untried: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Says who sums what, by the memory that a piece lies in."""
    sums: list[str] = []
    of_cache = some_piece().alike.memory.memory.numel()

    def watch(owner: Any, real_name: str, name: str) -> None:
        real = getattr(owner, real_name)

        def summed(piece: DigestPiece) -> Any:
            is_cache = piece.alike.memory.memory.numel() == of_cache
            sums.append(f"{name}, {'cache' if is_cache else 'noise'}")
            return real(piece)

        monkeypatch.setattr(owner, real_name, summed)

    watch(kernel, "sums_by_kernel", "kernel")
    watch(DigestPiece, "sums_by_torch", "torch")
    return sums


def test_each_kind_is_tried_on_noise_first(kernel: ModuleType, sums: list[str]) -> None:
    for seed in (1, 2):
        kernel.sums_surely(some_piece(seed))
    assert sums == ["kernel, noise", "torch, noise", "kernel, cache", "kernel, cache"]


def test_a_trial_leaves_the_samplers_numbers_alone(kernel: ModuleType) -> None:
    """Each rank of an engine draws the same from its device's generator."""
    before = torch.get_rng_state()
    assert kernel._is_right_for(some_piece())
    assert torch.equal(torch.get_rng_state(), before)


def test_no_digest_waits_for_the_compiler(kernel, sums, monkeypatch):
    is_compiled = threading.Event()
    kernel_thread._thread.submit(is_compiled.wait, 60)
    monkeypatch.setattr(kernel_thread, "patience_seconds", 0.0)
    kernel.sums_surely(some_piece())
    assert sums == ["torch, cache"]
    is_compiled.set()
    kernel_thread._thread.submit(int).result()
    kernel.sums_surely(some_piece())
    assert sums[-1] == "kernel, cache"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("axis", ["block", "head"])
def test_the_trial_sees_another_block_and_head(kernel, monkeypatch, layout, axis):
    piece, real = some_piece(layout=layout), kernel.sums_by_kernel
    assert kernel._is_right_for(piece)

    def wrong(piece: DigestPiece) -> torch.Tensor:
        if axis == "head":
            return real(piece).flip(1)
        return real(piece._replace(numbers=np.roll(piece.numbers, 1)))

    monkeypatch.setattr(kernel, "sums_by_kernel", wrong)
    assert not kernel._is_right_for(piece)


@pytest.mark.parametrize("fault", ["other bytes", "no compiler", "full disk"])
def test_one_that_is_wrong_or_does_not_compile_is_not_used(
    kernel, untried, monkeypatch, caplog, fault
):
    class NoKernel:
        def __getitem__(self, _: Any) -> Any:
            if fault == "other bytes":
                return lambda _, found, **__: found.add_(1)
            raise (RuntimeError if fault == "no compiler" else OSError)(fault)

    monkeypatch.setattr(kernel, "_add_up", NoKernel())
    for _ in range(2):
        piece = some_piece()
        assert torch.equal(kernel.sums_surely(piece), piece.sums_by_torch())
    kernel_thread._thread.submit(int).result()  # it has said so
    assert fault in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("unit", "width"), [("uint32", 64), ("uint8", 1024), ("uint16", 1)])
def test_it_compiles_to_a_gpus_code(kernel, monkeypatch, capability, unit, width):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(kernel, "_plus", triton.JITFunction(kernel._plus.fn))
    values = {"UNIT": getattr(triton.language, unit), "WIDTH": width, "HEAD": 18, "HEADS": 4}
    values["TOKENS"] = min(16, 4096 // width)
    ptx = compiled(kernel._add_up, {"table": "*i64", "found": "*i64"}, values, capability)
    assert "atom.global" in ptx or "red.global" in ptx
