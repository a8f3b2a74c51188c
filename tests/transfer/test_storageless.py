"""Blocks to and from a device whose tensors have no storage; the device is a stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvpatch.transfer import storageless
from kvpatch.transfer.storageless import StoragelessCaches, fetch, has_storage, shown, store
from tests.storageless import StoragelessStandIn

pytestmark = pytest.mark.patching

BLOCKS = 11


def layer(dimension: int) -> torch.Tensor:
    shape = [2, 3, 4]
    shape.insert(dimension, BLOCKS)
    count = 2 * 3 * 4 * BLOCKS
    return torch.arange(count, dtype=torch.int32).reshape(shape)


@pytest.mark.parametrize("dimension", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_blocks_come_and_go_whole(dimension: int, count: int) -> None:
    behind = layer(dimension)
    before = behind.clone()
    device = StoragelessStandIn(behind)
    blocks = np.random.default_rng(count).permutation(BLOCKS)[:count]

    found = fetch(device, dimension, blocks)

    for place, block in enumerate(blocks):
        assert torch.equal(found[place], before.select(dimension, block))
    store(device, dimension, blocks, found + 1000)
    for block in range(BLOCKS):
        more = 1000 if block in blocks else 0
        assert torch.equal(behind.select(dimension, block), before.select(dimension, block) + more)


def test_few_shapes_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a device compiles for each anew."""
    counts = set()
    select = torch.Tensor.index_select

    def counting(tensor: Any, dimension: int, numbers: torch.Tensor) -> torch.Tensor:
        counts.add(len(numbers))
        return select(tensor, dimension, numbers)

    monkeypatch.setattr(StoragelessStandIn, "index_select", counting)
    device = StoragelessStandIn(layer(0))
    for count in range(1, BLOCKS + 1):
        assert len(fetch(device, 0, np.arange(count))) == count
    assert counts == {1, 2, 4, 8, 16}


def test_a_storage_is_told_from_none() -> None:
    assert has_storage(torch.empty(5, 2))
    assert has_storage(torch.empty(0, 2))
    assert not has_storage(torch.empty(5, 2, device="meta")), "nowhere in memory"
    assert not has_storage(StoragelessStandIn(torch.empty(5, 2)))


@pytest.mark.parametrize("dimension", [0, 1, 3])
def test_blocks_are_shown_outermost(dimension: int) -> None:
    found = shown(StoragelessStandIn(layer(dimension)), dimension)
    in_blocks = fetch(StoragelessStandIn(layer(dimension)), dimension, np.arange(BLOCKS))

    assert found.device.type == "meta" and found.shape == layer(dimension).shape
    assert found.movedim(dimension, 0).stride() == in_blocks.stride()


class Forgetful(StoragelessStandIn):
    """One that does not keep what is stored."""

    def index_copy_(self, *_: Any) -> Any:
        return self


def test_a_device_that_does_not_keep_blocks_is_found_out() -> None:
    behind = {"right": layer(1), "wrong": layer(1)}
    before = {name: tensor.clone() for name, tensor in behind.items()}
    tensors = {"right": StoragelessStandIn(behind["right"]), "wrong": Forgetful(behind["wrong"])}
    caches = StoragelessCaches(
        tensors, {n: shown(t, 1) for n, t in tensors.items()}, dict.fromkeys(tensors, 1)
    )

    assert caches.find_wrong() == ["wrong"]
    assert all(torch.equal(behind[name], before[name]) for name in behind), "as before"


@pytest.mark.parametrize("bits", [0, 0x7F81, -1])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_a_device_that_knows_one_nan_keeps_blocks(kind: torch.dtype, bits: int) -> None:
    """As XLA's CPU does, whatever lies in a cache that was never written."""
    behind = torch.full((BLOCKS, 2, 3), bits, dtype=torch.int16).view(kind)
    device = StoragelessStandIn(behind)

    assert StoragelessCaches({"a": device}, {"a": shown(device)}, {"a": 0}).find_wrong() == []


def test_a_device_that_puts_things_off_is_told_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before blocks are fetched, and after they are stored: else each store is compiled anew."""
    asked: list[str] = []
    monkeypatch.setattr(StoragelessStandIn, "asked", asked)
    monkeypatch.setattr(storageless, "_begin", lambda tensor: asked.append("begin"))
    device = StoragelessStandIn(layer(0))

    store(device, 0, np.array([3]), fetch(device, 0, np.array([3])))

    assert asked == ["begin", "aten.index_select.default", "aten.index_copy_.default", "begin"]
