"""Runs of a direct read in several plans, and how many of them one post takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.direct_plan import Plan, plan_parts
from kvpatch.geometry.plane_copies import copies_between
from kvpatch.geometry.segments import BlockList, Segments, pair_blocks
from kvpatch.transfer.staged_read import SPREAD_RUNS, runs_of_a_post

from .planned import plan_runs
from .test_direct_plan import DRAM, SOURCE, transfers
from .whole_caches import CacheSizes, named_layout


def _joined(plans: list[Plan]) -> list[tuple[int, int, int]]:
    columns = ("remote_address", "local_address", "length")
    found = [np.concatenate([getattr(plan, name) for plan in plans]) for name in columns]
    return list(zip(*(column.tolist() for column in found), strict=True))


@given(transfers(), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_together_they_are_the_whole_plan(drawn: Any, most_runs: int, lots: int) -> None:
    remote, local, first, end = drawn
    segments = pair_blocks(remote.blocks, local.blocks, first, end)
    copies = copies_between(remote.planes, local.planes)
    parts = [(segments, copies[at::lots]) for at in range(lots)]
    whole = plan_runs(parts)

    found = list(plan_parts(parts, most_runs))

    assert sum(map(len, found)) == len(whole)
    if found:
        assert _joined(found) == _joined([whole])
        assert all(map(len, found))
    if len(found) > 1:  # as few as can be: two neighbours never fit into one
        pairs = zip(found, found[1:], strict=False)
        assert all(len(one) + len(other) > most_runs for one, other in pairs)
        assert _joined(found[1:]) != _joined([whole])  # the comparison can fail


def test_what_cannot_be_planned_is_refused_before_the_first_plan() -> None:
    planes = named_layout("LBNHC").planes(CacheSizes(2, 4, 2, 4, 8, 2), SOURCE, DRAM)
    copies = copies_between(planes, planes)
    right = pair_blocks(BlockList(np.array([0, 1]), 4), BlockList(np.array([1, 0]), 4), 0, 8)
    outside = replace(right, remote_block=right.remote_block + 3)
    assert len(next(plan_parts([(right, copies)], 1))) > 0
    with pytest.raises(UnplannableCopy):
        next(plan_parts([(right, copies), (outside, copies)], 1))


def test_nothing_is_no_plan() -> None:
    nothing = Segments(*(np.empty(0, dtype=np.int64) for _ in range(5)))
    assert list(plan_parts([])) == []
    assert list(plan_parts([(nothing, [])])) == []


def _plan(count: int, run_bytes: int) -> Plan:
    at = np.arange(count, dtype=np.int64) * run_bytes
    return Plan(at, at + (1 << 40), np.full(count, run_bytes, dtype=np.int64))


@pytest.mark.parametrize(
    ("run_bytes", "count", "taken"),
    [
        (1 << 20, 100, [32, 32, 32, 4]),  # too large to be spread
        (64 << 10, 3000, [1024, 1024, 512, 440]),
        (1 << 12, 20_000, [8192, 8192, 3616]),
        (16 << 10, 3000, [2048, 952]),
        (64 << 10, 600, [512, 88]),  # too few to be spread
        (1 << 30, 2, [1, 1]),
    ],
)
def test_a_post_takes_enough_runs_to_be_spread(
    run_bytes: int, count: int, taken: list[int]
) -> None:
    plan = _plan(count, run_bytes)
    found, left = [], plan
    while len(left):
        found.append(left.part(0, runs_of_a_post(left.length, is_spread=True)))
        left = left.part(len(found[-1]), len(left))
    assert [len(part) for part in found] == taken
    assert _joined(found) == _joined([plan])
    assert SPREAD_RUNS == 1024
