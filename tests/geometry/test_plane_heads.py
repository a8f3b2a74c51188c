"""Heads that several ranks hold are read from one of them, and every head from some."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.geometry.direct_plan import plan_parts
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Content, Memory, Plane, names_of_heads, planes_without
from kvpatch.geometry.segments import BlockList, pair_blocks
from tests.geometry.whole_caches import CacheSizes, named_layout

DRAM = Memory("DRAM")
BLOCKS, TOKENS = 3, 8


def _planes(heads: range, layout: str, address: int) -> list[Plane]:
    sizes = CacheSizes(
        layers=2, blocks=BLOCKS, heads=len(heads), block_tokens=4, channels=2, item_bytes=2
    )
    planes = named_layout(layout).planes(sizes, address, DRAM)
    return [replace(plane, first_head=heads.start) for plane in planes]


@st.composite
def _ranges(draw) -> list[range]:
    """What ranks hold of six heads; each of these is on one at least."""
    found = [
        range(first, draw(st.integers(first + 1, 6)))
        for first in draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    ]
    missing = set(range(6)).difference(*found)
    return found + [range(head, head + 1) for head in sorted(missing)]


@given(_ranges(), st.sampled_from(["LBHNC", "LBNHC"]), st.sampled_from(["LBHNC", "LBNHC"]))
def test_each_byte_is_written_once_from_the_first_rank_that_has_its_head(ranges, remote, local):
    ours = _planes(range(6), local, 1 << 40)
    segments = pair_blocks(
        BlockList(np.array([2, 0]), 4), BlockList(np.array([1, 2]), 4), 0, TOKENS
    )
    taken: frozenset = frozenset()
    written: Counter[int] = Counter()
    for number, heads in enumerate(ranges):
        theirs = _planes(heads, remote, (number + 1) << 30)
        regions = [
            [plane for plane in theirs if plane.layer == layer]
            for layer in dict.fromkeys(plane.layer for plane in theirs)
        ]
        overlaps = overlaps_of(regions, planes_without(ours, taken))
        fresh = names_of_heads(theirs) - taken
        assert bool(overlaps) == bool(fresh)
        copies = [copy for overlap in overlaps for copy in overlap.copies]
        bytes_read = 0
        for plan in plan_parts([(segments, copies)]):
            runs = zip(plan.local_address.tolist(), plan.length.tolist(), strict=True)
            for start, length in runs:
                written.update(range(start, start + length))
                bytes_read += length
        assert bytes_read == len(fresh) * TOKENS * 2 * 2
        taken |= names_of_heads(theirs)
    assert set(written.values()) == {1}
    assert len(written) == len(names_of_heads(ours)) * TOKENS * 2 * 2


def test_without_it_a_head_of_two_ranks_is_written_twice():
    """The negative control of the count above."""
    ours = _planes(range(2), "LBHNC", 1 << 40)
    segments = pair_blocks(BlockList(np.array([2]), 4), BlockList(np.array([1]), 4), 0, 4)
    written: Counter[int] = Counter()
    for number in range(2):
        theirs = _planes(range(1), "LBHNC", (number + 1) << 30)
        overlaps = overlaps_of([theirs[:2], theirs[2:]], planes_without(ours, ()))
        copies = [copy for overlap in overlaps for copy in overlap.copies]
        for plan in plan_parts([(segments, copies)]):
            written.update(plan.local_address.tolist())
    assert set(written.values()) == {2}


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_plane_that_moves_whole_is_left_out_with_all_of_its_heads(taken):
    whole = [replace(plane, is_whole=True) for plane in _planes(range(3), "LBHNC", 1 << 30)]
    heads = {(plane.layer, plane.content, n) for plane in whole for n in range(taken)}
    assert planes_without(whole, heads) == ([] if taken == 3 else whole)
    assert all(plane.content in (Content.KEY, Content.VALUE) for plane in whole)
