"""Which way is chosen by costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpatch.geometry.overlap import HOST_MEMORY, Costs, is_direct, overlaps_of
from kvpatch.geometry.plane import Memory
from kvpatch.geometry.segments import BlockList, pair_blocks

from .whole_caches import CacheSizes, named_layout

pytestmark = pytest.mark.geometry

MEMORY = Memory("DRAM")


def chosen(layout: str, costs: Costs, tokens: int = 16) -> bool:
    """Whether blocks of HND are read directly out of another layout's."""
    sizes = CacheSizes(1, 8, 8, tokens, 128, 2)
    remote = named_layout(layout).planes(sizes, 0, MEMORY)
    local = named_layout("LBHNC").planes(replace(sizes, block_tokens=32, blocks=4), 0, MEMORY)
    (overlap,) = overlaps_of([remote], local)
    segments = pair_blocks(BlockList(range(8), tokens), BlockList(range(4), 32), 0, 8 * tokens)
    return is_direct(overlap, segments, costs)


@pytest.mark.parametrize(
    ("layout", "changed", "expected"),
    [
        ("LBHNC", {}, True),
        ("LBNHC", {}, False),
        ("LBHNC", {"run_seconds": 1e-4}, False),
        ("LBNHC", {"run_seconds": 1e-8}, True),
        ("LBHNC", {"copy_bytes_per_second": 1e12}, False),
        ("LBNHC", {"copy_bytes_per_second": 1e8}, True),
    ],
)
def test_each_cost_decides_where_it_is_extreme(layout, changed, expected):
    costs = replace(HOST_MEMORY, **changed)
    assert chosen(layout, costs) is expected
    assert (chosen("LBHNC", HOST_MEMORY), chosen("LBNHC", HOST_MEMORY)) == (True, False)
