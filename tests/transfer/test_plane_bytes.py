"""What is behind the last token is zeroed, and nothing that is not a layer's own.

Of any layout: ``tests/geometry/test_direct_plan.py``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane import Memory
from kvpatch.geometry.segments import BlockList, uncovered_tail
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.one_memory import storage_of
from kvpatch.transfer.plane_bytes import zero_tokens
from tests.geometry.whole_caches import CacheSizes, as_array, named_layout

pytestmark = pytest.mark.patching

SIZES = CacheSizes(layers=7, blocks=9, heads=3, block_tokens=16, channels=8, item_bytes=2)
TAIL = uncovered_tail(BlockList(np.array([4, 7, 2]), 16), 21)
DRAM = Memory("DRAM")


def noise() -> torch.Tensor:
    drawn = np.random.default_rng(0).integers(1, 256, SIZES.total_bytes(), dtype=np.uint8)
    return torch.from_numpy(drawn)


def test_a_tensor_that_several_layers_share_is_zeroed():
    memory = noise()
    planes = named_layout("LBHNC").planes(SIZES, memory.data_ptr(), DRAM)[:2]
    wanted = memory.numpy().copy()
    for plane in planes:
        view = as_array(plane, wanted, memory.data_ptr())
        view[7, :, 5:] = view[2] = 0
    layers = dict.fromkeys([planes[0].layer, "b"], memory)
    Caches(layers).zero([([*planes, *(replace(p, layer="b") for p in planes)], TAIL)], None)
    assert np.array_equal(memory.numpy(), wanted)


@pytest.mark.parametrize("change", [{"blocks": 7}, {"block_tokens": 15}])
def test_what_a_plane_does_not_have_is_refused(change):
    memory = noise()
    before = memory.clone()
    plane = named_layout("LBHNC").planes(SIZES, memory.data_ptr(), DRAM)[-1]
    short = replace(plane, counts=plane.counts._replace(**change))
    with pytest.raises(UnplannableCopy, match="expected to zero"):
        zero_tokens(storage_of(memory), short, TAIL)
    assert torch.equal(memory, before)


def test_what_lies_outside_its_layers_own_tensor_is_refused():
    """Between two layers may be anybody's memory."""
    memory = noise()
    before = memory.clone()
    planes = named_layout("LBHNC").planes(SIZES, memory.data_ptr(), DRAM)
    parts = memory.clone().split(memory.numel() // SIZES.layers)
    caches = Caches({f"layer.{number}": part for number, part in enumerate(parts)})
    with pytest.raises(UnplannableCopy, match=r"layer\.0"):
        caches.zero([(planes, TAIL)], None)
    assert torch.equal(memory, before)
