"""Blocks to and from torch_xla's CPU device, which is XLA as a TPU has it."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from kvpatch.transfer.storageless import StoragelessCaches, fetch, has_storage, shown, store

os.environ.setdefault("PJRT_DEVICE", "CPU")
torch_xla = pytest.importorskip(
    "torch_xla",
    reason="torch_xla is not installed: run this with the Python that experiments/env_xla.sh makes",
)
pytestmark = pytest.mark.patching

BLOCKS = 11
KINDS = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def noise(kind: torch.dtype, shape: tuple[int, ...], *, numbers_only: bool) -> torch.Tensor:
    item = torch.empty(0, dtype=kind).element_size()
    raw = np.random.default_rng(1).integers(0, 256, (*shape, item), dtype=np.uint8)
    if numbers_only:
        raw[..., item - 1] &= 0xBF  # the exponent's highest bit
    return torch.from_numpy(raw).view(kind).squeeze(-1)


@pytest.mark.parametrize("dimension", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_blocks_come_and_go_whole(kind: torch.dtype, dimension: int) -> None:
    shape = [2, 3, 4]
    shape.insert(dimension, BLOCKS)
    host = noise(kind, tuple(shape), numbers_only=True)
    device = host.to(torch_xla.device())
    blocks = np.array([3, 10, 0, 7, 1])

    found = fetch(device, dimension, blocks)
    other = (bits(found) ^ 1).view(kind)
    store(device, dimension, blocks, other)

    wanted = bits(host).movedim(dimension, 0).clone()
    assert torch.equal(bits(found), wanted[blocks])
    wanted[blocks] ^= 1
    assert torch.equal(bits(device.cpu().movedim(dimension, 0)), wanted), "the others too"


def test_it_has_no_storage() -> None:
    assert not has_storage(torch.zeros(5, 2, device=torch_xla.device()))


@pytest.mark.parametrize("before", ["zeroes", "noise"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_its_own_copies_are_found_right(kind: torch.dtype, before: str) -> None:
    """Of memory that was never written too, where a NaN may be anything."""
    host = noise(kind, (BLOCKS, 2, 3, 4), numbers_only=False)
    if before == "zeroes":
        host = torch.zeros(host.shape).to(kind)
    device = host.to(torch_xla.device())
    caches = StoragelessCaches({"a": device}, {"a": shown(device)}, {"a": 0})

    assert caches.find_wrong() == []


def test_each_copy_is_compiled_once_and_changes_the_cache_where_it_lies() -> None:
    from torch_xla.debug import metrics

    device = torch.zeros(64, 2, 16, dtype=torch.bfloat16, device=torch_xla.device())
    torch_xla.sync()

    def counts() -> list[int]:
        found = [metrics.metric_data(name) for name in ("CompileTime", "InputOutputAliasCount")]
        return [0 if of_name is None else of_name[0] for of_name in found]

    def store_and_fetch(block: int) -> None:
        blocks = np.array([block, block + 1])
        store(device, 0, blocks, torch.full((2, 2, 16), block, dtype=torch.bfloat16))
        assert int(fetch(device, 0, blocks)[0, 0, 0]) == block

    before = counts()
    store_and_fetch(1)
    first = counts()
    assert first[1] > before[1], "what is stored takes the place of what was"
    for block in range(2, 12):
        store_and_fetch(block)
    assert counts() == first
    torch_xla.sync()
    assert counts() == first, "nothing is left for the model's own step"
