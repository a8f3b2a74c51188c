"""Triton's kernel for placing: what it places in Triton's interpreter, and that it compiles.

The interpreter runs the kernel's own code on a CPU. Here nothing runs on a GPU.
"""

from __future__ import annotations

import threading
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane_copies import CopyAxis, CopyStrides
from kvpatch.geometry.segments import BlockList, pair_blocks
from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer import kernel_thread
from kvpatch.transfer.caches import placing_on
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.place import place_on_device
from tests.geometry.interpreted_kernel import compiled, interpreted_kernel

pytestmark = pytest.mark.patching

CPU = torch.device("cpu")


@pytest.fixture
def kernel() -> ModuleType:
    return interpreted_kernel()


class Launches:
    """Triton's kernel, with a count of the launches that run something.

    Args:
        error: raised by each launch in its place.
    """

    def __init__(self, kernel: Any, error: Exception | None = None) -> None:
        self._kernel, self._error = kernel, error
        self.count = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.count += grid[0] > 0
        return self._kernel[grid] if self._error is None else self._fail

    def _fail(self, *_: Any, **__: Any) -> None:
        raise self._error or AssertionError


@pytest.fixture
def launches(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches(kernel._copy)
    monkeypatch.setattr(kernel, "_copy", launches)
    return launches


def assert_read(kernel: ModuleType) -> None:
    """Places a chunk as a read does: its bytes are where indexing places them."""
    strides = CopyStrides(2, CopyAxis(4, 96, 64), CopyAxis(6, 16, 4), (CopyAxis(2, 2, 2),))
    blocks = BlockList(np.array([2, 0, 1, 3]), 6), BlockList(np.array([5, 1, 0, 4, 2]), 4)
    staging = torch.arange(4 * 96).mul(7).to(torch.uint8)
    found, expected = torch.zeros(2, 6 * 64, dtype=torch.uint8)
    for place, memory in ((kernel.place_surely, found), (place_on_device, expected)):
        placement = Placement("", 0, memory.data_ptr(), strides, pair_blocks(*blocks, 1, 20))
        place(staging, [(Bytes(memory.data_ptr(), memory), placement)])
    assert torch.equal(found, expected)
    assert expected.any()


def test_it_places_what_indexing_places(kernel: ModuleType) -> None:
    """The trial that an engine makes before it uses the kernel."""
    assert kernel.is_right_on(CPU)


def test_a_device_with_triton_uses_it(kernel: ModuleType) -> None:
    assert placing_on(torch.device("cuda", 0)) is kernel.place_surely
    assert placing_on(CPU) is place_on_device


def test_no_read_waits_for_the_compiler(kernel, launches, untried, monkeypatch):
    """Neither for the trial's kernels nor for its own; and it uses them when they are there."""
    is_compiled = threading.Event()
    kernel_thread._thread.submit(is_compiled.wait, 60)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_thread, "patience_seconds", 0.0)
        assert_read(kernel)
        assert launches.count == 0
        is_compiled.set()
        kernel_thread._thread.submit(int).result()
        tried = launches.count
        assert_read(kernel)
        assert launches.count == tried > 0, "another kind, which is compiled now"
        kernel_thread._thread.submit(int).result()
        assert_read(kernel)
    assert launches.count == tried + 1


@pytest.mark.parametrize(
    ("fault", "is_tried"),
    [
        ("other bytes", False),  # which are looked for in the trial alone
        *product(["no compiler", "full disk", "no assembler", "a fault of Triton"], [False, True]),
    ],
)
def test_one_that_is_wrong_or_does_not_compile_is_not_used(
    kernel, untried, monkeypatch, caplog, fault, is_tried
):
    """Triton compiles it for each number of axes anew."""
    from triton.errors import TritonError

    def wrong(staging: torch.Tensor, into: Any, _: Any = None) -> None:
        place_on_device(staging, into)
        ((_, memory), _) = into[0]
        memory[17] += 1

    kinds = {"no compiler": RuntimeError, "full disk": OSError, "no assembler": TritonError}
    if fault == "other bytes":
        monkeypatch.setattr(kernel, "place_by_kernel", wrong)
    else:
        failing = Launches(kernel._copy, kinds.get(fault, KeyError)(fault))
        monkeypatch.setattr(kernel, "_copy", failing)
    if is_tried:
        assert kernel_thread.is_ready(CPU, "placing", lambda: True)
    for _ in range(2):
        assert_read(kernel)
    kernel_thread._thread.submit(int).result()  # it has said so
    assert fault in caplog.text and len(caplog.records) == 1


def test_memory_that_is_short_for_once_ends_no_kernel(kernel, launches, untried, monkeypatch):
    with monkeypatch.context() as patch:
        full = Launches(kernel._copy, torch.OutOfMemoryError("no memory"))
        patch.setattr(kernel, "_copy", full)
        assert_read(kernel)
    assert launches.count == 0
    assert_read(kernel)
    assert launches.count > 1


@pytest.mark.parametrize("item", [2, 4, 8])
@pytest.mark.parametrize("fault", ["block", "layer"])
def test_the_trial_sees_another_block_and_layer(kernel, monkeypatch, item, fault):
    real = kernel.place_by_kernel

    def wrong(staging: torch.Tensor, into: Any) -> None:
        if fault == "block":  # each of a layer's four takes the next one's place
            layers = staging.view(2, 4, -1)
            staging = layers.roll(1, 1).reshape(-1)
        else:
            staging = staging.view(2, -1).flip(0).reshape(-1)
        real(staging, into)

    assert kernel.is_right_on(CPU, [item])
    monkeypatch.setattr(kernel, "place_by_kernel", wrong)
    assert not kernel.is_right_on(CPU, [item])


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


def test_more_than_it_can_count_is_refused(kernel, monkeypatch):
    monkeypatch.setattr(kernel, "_MOST_UNITS", 10)
    with pytest.raises(UnplannableCopy, match="expected at most 10 units"):
        kernel.is_right_on(CPU)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("item", "items"), [("int8", 1), ("int64", 1), ("int64", 2)])
def test_it_compiles_to_a_gpus_code(kernel, capability, item, items):
    """16 bytes at once."""
    values = {"ITEM": getattr(kernel.tl, item), "ITEMS": items, "AXES": 5, "TILE": 1024}
    signature = {"table": "*i64", "tiles_at": "i32"}
    ptx = compiled(kernel._copy, signature, values, capability)
    assert ("ld.global.v2.b64" in ptx) == (items == 2)
    assert ("st.global.v2.b64" in ptx) == (items == 2)
