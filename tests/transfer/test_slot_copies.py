"""Slots taken before and after: how far each plane's are apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpatch.geometry.memory import Memory
from kvpatch.geometry.slot_gather import Table, slot_gather
from kvpatch.transfer import slot_copies
from kvpatch.transfer.one_memory import storage_of
from kvpatch.transfer.slot_copies import SlotCopies
from tests.geometry.whole_caches import CacheSizes, named_layout

SIZES = CacheSizes(layers=3, blocks=4, heads=2, block_tokens=4, channels=8, item_bytes=2)
POSITION, BLOCK = 6, 2


class World:
    """A cache of random numbers, and its slots."""

    def __init__(self, layout: str, dtype: torch.dtype) -> None:
        sizes = SIZES if dtype.itemsize == 2 else CacheSizes(3, 4, 2, 4, 8, dtype.itemsize)
        flat = torch.randn(sizes.total_bytes() // dtype.itemsize).to(dtype)
        self.raw = storage_of(flat)
        self.flat = flat
        planes = named_layout(layout).planes(sizes, self.raw.address, Memory("DRAM"))
        gather = slot_gather(planes, [Table(0, 4)] * len(planes), self.raw.address)
        self.copies = SlotCopies(gather, self.raw, dtype)
        starts = gather.starts(POSITION, (BLOCK,))
        assert starts is not None
        self.starts = starts
        self.where = starts[gather.plane_of_item] + gather.inner

    def set_plane(self, plane: int, values: torch.Tensor) -> None:
        chosen = torch.from_numpy(self.where[self.copies.gather.plane_of_item == plane])
        self.flat[chosen] = values.to(self.flat.dtype)

    def plane(self, plane: int) -> torch.Tensor:
        chosen = torch.from_numpy(self.where[self.copies.gather.plane_of_item == plane])
        return self.flat[chosen].double()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_distances_are_those_of_the_planes(layout: str, dtype: torch.dtype) -> None:
    world = World(layout, dtype)
    before = world.plane(3)
    taken = world.copies.take([world.starts, world.starts])
    world.set_plane(3, torch.randn(16))
    world.set_plane(4, 2 * world.plane(4))

    pending = taken.compare()

    assert pending.is_ready()
    found = pending.read()
    after = world.plane(3)
    expected = (after - before).norm() / max(after.norm(), before.norm())
    assert found.shape == (2, 6)
    assert found[0] == pytest.approx(found[1])
    assert found[0, 3] == pytest.approx(float(expected), rel=1e-4)
    assert found[0, 4] == pytest.approx(0.5)
    assert not found[0, [0, 1, 2, 5]].any()


def test_many_slots_are_taken_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_copies, "_SLOTS_AT_ONCE", 2)
    world = World("HND", torch.float32)
    taken = world.copies.take([world.starts] * 5)
    world.set_plane(1, 2 * world.plane(1))
    found = taken.compare().read()
    assert found.shape == (5, 6)
    assert found[:, 1] == pytest.approx([0.5] * 5)
    assert not np.delete(found, 1, axis=1).any()


def test_zeros_are_no_distance_from_zeros_and_all_of_it_from_others() -> None:
    world = World("HND", torch.float32)
    for plane in (0, 1):
        world.set_plane(plane, torch.zeros(16))
    taken = world.copies.take([world.starts])
    world.set_plane(1, torch.ones(16))
    found = taken.compare().read()[0]
    assert (found[0], found[1]) == (0.0, 1.0)


def test_what_is_no_number_is_no_distance() -> None:
    world = World("HND", torch.float32)
    taken = world.copies.take([world.starts])
    world.set_plane(0, torch.full((16,), float("nan")))
    world.set_plane(1, torch.full((16,), float("inf")))
    found = taken.compare().read()[0]
    assert np.isnan(found[:2]).all()
    assert not found[2:].any()


def test_bytes_are_read_as_numbers_of_eight_bits() -> None:
    world = World("HND", torch.float8_e4m3fn)
    taken = world.copies.take([world.starts])
    world.set_plane(2, 2 * world.plane(2).clamp(-200, 200))
    found = taken.compare().read()[0]
    assert found[2] == pytest.approx(0.5)


def test_what_is_kept_of_a_step_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("HND", torch.bfloat16)
    slot_bytes = world.copies.items(torch.from_numpy(world.starts[None])).nbytes
    monkeypatch.setattr(slot_copies, "_MOST_TAKEN_BYTES", 3 * slot_bytes + 1)
    assert world.copies.most_slots == 3
    monkeypatch.setattr(slot_copies, "_MOST_TAKEN_BYTES", 1)
    assert world.copies.most_slots == 1
