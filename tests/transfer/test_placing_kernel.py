"""Triton's kernel for placing: what it places in Triton's interpreter, and that it compiles.

The interpreter runs the kernel's own code on a CPU. Here nothing runs on a GPU.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane_copies import CopyAxis, CopyStrides
from kvpatch.geometry.segments import BlockList, pair_blocks
from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer.caches import placing_on
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.place import place_on_device
from tests.geometry.interpreted_kernel import interpreted_kernel

pytestmark = pytest.mark.patching

CPU = torch.device("cpu")


@pytest.fixture
def kernel() -> ModuleType:
    return interpreted_kernel()


@pytest.fixture
def as_cuda(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake: a CPU device that says that it is CUDA's."""

    class Device:
        type = "cuda"

    monkeypatch.setattr(kernel, "is_right_on", lambda _, is_right=kernel.is_right_on: is_right(CPU))
    return Device()


def test_it_places_what_indexing_places(kernel: ModuleType, as_cuda: Any) -> None:
    """The trial that an engine makes before it uses the kernel."""
    assert kernel.is_right_on(CPU)
    assert placing_on(as_cuda) is kernel.place_surely
    assert placing_on(CPU) is place_on_device


def test_one_that_places_other_bytes_is_not_used(
    kernel: ModuleType,
    as_cuda: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wrong(staging: torch.Tensor, into: Any) -> None:
        place_on_device(staging, into)
        ((_, memory), _) = into[0]
        memory[17] += 1

    monkeypatch.setattr(kernel, "place_by_kernel", wrong)
    assert placing_on(as_cuda) is place_on_device
    assert "places other bytes" in caplog.text


def test_one_that_does_not_compile_is_not_used(
    kernel: ModuleType,
    as_cuda: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_compiler(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernel, "place_by_kernel", no_compiler)
    assert placing_on(as_cuda) is place_on_device
    assert "Failed to find C compiler" in caplog.text


@pytest.mark.parametrize("kind", ["full disk", "no assembler"])
def test_one_that_does_not_compile_later_is_left_out(
    kernel: ModuleType, as_cuda: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Triton compiles for each number of axes, in the midst of a request, which ends no read."""
    from triton.errors import TritonError

    by_kernel, place = kernel.place_by_kernel, placing_on(as_cuda)
    error = OSError(28, "No space left on device") if kind == "full disk" else TritonError("ptxas")

    class NoKernel:
        def __getitem__(self, _: Any) -> Any:
            raise error

    def as_in_a_read(staging: torch.Tensor, into: Any) -> None:
        monkeypatch.setattr(kernel, "place_by_kernel", by_kernel)
        place(staging, into)

    monkeypatch.setattr(kernel, "_copy", NoKernel())
    monkeypatch.setattr(kernel, "place_by_kernel", as_in_a_read)
    assert kernel._is_right_in(CPU, 2), "it places what indexing places"


@pytest.mark.parametrize("item", [2, 4, 8])
@pytest.mark.parametrize("fault", ["block", "layer"])
def test_the_trial_sees_another_block_and_layer(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, item: int, fault: str
) -> None:
    real = kernel.place_by_kernel

    def wrong(staging: torch.Tensor, into: Any) -> None:
        if fault == "block":  # each of a layer's four takes the next one's place
            layers = staging.view(2, 4, -1)
            staging = layers.roll(1, 1).reshape(-1)
        else:
            staging = staging.view(2, -1).flip(0).reshape(-1)
        real(staging, into)

    assert kernel._is_right_in(CPU, item)
    monkeypatch.setattr(kernel, "place_by_kernel", wrong)
    assert not kernel._is_right_in(CPU, item)


def test_blocks_beyond_2_gib(kernel: ModuleType) -> None:
    """Into a cache of 6 GiB, of which three blocks are ever touched."""
    block_bytes, blocks, tokens = 2048, 3 * 2**20, 16
    cache = torch.empty(block_bytes * blocks, dtype=torch.uint8)
    staging = torch.arange(3 * block_bytes).mul(7).to(torch.uint8)
    strides = CopyStrides(2, CopyAxis(blocks, block_bytes, block_bytes), CopyAxis(tokens, 128, 128),
                          (CopyAxis(64, 2, 2),))  # fmt: skip
    ids = np.array([blocks - 1, 2**20 + 1, 0])
    segments = pair_blocks(BlockList(np.arange(3), tokens), BlockList(ids, tokens), 0, 3 * tokens)
    placement = Placement("", 0, cache.data_ptr(), strides, segments)

    kernel.place_by_kernel(staging, [(Bytes(cache.data_ptr(), cache), placement)])

    placed = [cache[number * block_bytes :][:block_bytes] for number in ids.tolist()]
    assert torch.equal(torch.cat(placed), staging)


def test_more_than_it_can_count_is_refused(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_MOST_UNITS", 10)
    with pytest.raises(UnplannableCopy, match="expected at most 10 units"):
        kernel.is_right_on(CPU)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("item", "items"), [("int8", 1), ("int64", 1), ("int64", 2)])
def test_it_compiles_to_a_gpus_code(
    kernel: ModuleType, capability: int, item: str, items: int
) -> None:
    """By the compiler that Triton brings, for a GPU that is not here; 16 bytes at once."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=triton.JITFunction(kernel._copy.fn),
        signature={"table": "*i64", "tiles_at": "i32"}
        | dict.fromkeys(("ITEM", "ITEMS", "AXES", "TILE"), "constexpr"),
        constexprs={
            "ITEM": getattr(triton.language, item),
            "ITEMS": items,
            "AXES": 5,
            "TILE": 1024,
        },
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(made.asm["cubin"]) > 1000
    assert ("ld.global.v2.b64" in made.asm["ptx"]) == (items == 2)
    assert ("st.global.v2.b64" in made.asm["ptx"]) == (items == 2)
