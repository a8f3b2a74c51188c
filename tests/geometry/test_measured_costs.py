"""Which way is chosen by costs, and costs out of what reads took."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvpatch.geometry.direct_or_staged import (
    HOST_MEMORY,
    Costs,
    direct_seconds,
    is_direct,
    staged_seconds,
)
from kvpatch.geometry.measured_costs import Timed, measured_costs, probed_costs
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.segments import BlockList, pair_blocks

from .whole_caches import CacheSizes, named_layout

pytestmark = pytest.mark.geometry

MEMORY = Memory("DRAM")

RATES = st.floats(1e8, 1e11)
COSTS = st.builds(Costs, st.floats(1e-8, 1e-4), RATES, RATES, RATES)
FACTORS = st.floats(0.05, 50)
SIZES = st.integers(1 << 20, 1 << 32)
RUNS = st.integers(1, 1 << 20)


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
        ("LBHNC", {"wire_bytes_per_second": 1e8}, False),
        ("LBNHC", {"chunk_bytes_per_second": 1e8}, True),
    ],
)
def test_each_cost_decides_where_it_is_extreme(layout, changed, expected):
    costs = replace(HOST_MEMORY, **changed)
    assert chosen(layout, costs) is expected
    assert (chosen("LBHNC", HOST_MEMORY), chosen("LBNHC", HOST_MEMORY)) == (True, False)


@given(COSTS, st.lists(FACTORS, min_size=3, max_size=5), RUNS, SIZES)
def test_a_direct_read_is_expected_to_take_what_the_fastest_took(start, factors, runs, size):
    believed = direct_seconds(start, runs, size)
    found = measured_costs(start, [Timed(runs, size, believed * one) for one in factors], [])
    assert direct_seconds(found, runs, size) == pytest.approx(believed * min(factors))
    # A wire as much slower is so for both ways; what never touches it stays.
    assert found.chunk_bytes_per_second == pytest.approx(
        start.chunk_bytes_per_second / min(factors)
    )
    assert found.copy_bytes_per_second == start.copy_bytes_per_second


@given(
    COSTS,
    st.lists(st.floats(1e-2, 10), min_size=3, max_size=5),
    st.just(0) | st.floats(0.01, 0.9),
    SIZES,
)
def test_a_staged_read_is_expected_to_take_what_the_fastest_took(start, seconds, share, size):
    reads = [Timed(1, size, one, one * share, size) for one in seconds]
    found = measured_costs(start, [], reads)
    expected = min(seconds)
    if not share:  # nobody waited for its copies
        expected += size / start.copy_bytes_per_second
    assert staged_seconds(found, 1, size, size) == pytest.approx(expected)
    believed = start.run_seconds + size / start.chunk_bytes_per_second
    slower = min(seconds) * (1 - share) / believed
    of_wire = found.wire_bytes_per_second / start.wire_bytes_per_second
    of_chunk = found.chunk_bytes_per_second / start.chunk_bytes_per_second
    assert of_wire == pytest.approx(of_chunk)
    assert found.run_seconds == pytest.approx(start.run_seconds * max(1, slower))
    if slower > 1:  # what was not tried is believed to be slower by as much
        expected = slower * direct_seconds(start, 1000, size)
        assert direct_seconds(found, 1000, size) == pytest.approx(expected)


@given(COSTS, SIZES, st.integers(1, 8))
def test_copies_are_of_what_is_wanted(start, size, landed_of_wanted):
    """More lands than is copied out of the pool: the copy is not faster for it."""
    wanted = size // landed_of_wanted
    reads = [Timed(1, size, 1.0, 0.25, wanted)] * 3
    found = measured_costs(start, [], reads)
    assert found.copy_bytes_per_second == pytest.approx(wanted / 0.25)
    assert staged_seconds(found, 1, size, wanted) == pytest.approx(1.0)


@given(COSTS, st.lists(st.builds(Timed, RUNS, SIZES, st.floats(1e-3, 10)), max_size=2))
def test_few_reads_of_a_way_have_no_say(start, reads):
    assert measured_costs(start, reads, reads) == start


@given(COSTS, FACTORS, FACTORS, RUNS, SIZES)
def test_both_ways_are_expected_to_take_what_they_took(start, slower, staged, runs, size):
    believed = direct_seconds(start, runs, size) * slower
    took = staged * size / start.chunk_bytes_per_second
    direct = [Timed(runs, size, believed)] * 3
    found = measured_costs(start, direct, [Timed(1, size, took, took / 2, size)] * 3)
    assert direct_seconds(found, runs, size) == pytest.approx(believed)
    of_run = found.run_seconds  # which may be longer than all of the other way
    expected = max(took, took / 2 + of_run)
    assert staged_seconds(found, 1, size, size) == pytest.approx(expected, abs=2e-9)


def test_one_slow_read_among_recent_ones_changes_nothing():
    def took(*seconds: float) -> Costs:
        return measured_costs(HOST_MEMORY, [], [Timed(8, 1 << 26, one, 0.01) for one in seconds])

    assert took(0.04, 0.05, 0.05, 5.0) == took(0.04, 0.05, 0.05)
    assert took(5.0, 5.0, 5.0) != took(0.04, 0.05, 0.05), "negative control"


@given(st.floats(1e-8, 1e-4), RATES, RATES, st.lists(st.floats(1, 20), min_size=3, max_size=3))
def test_a_probe_finds_the_costs_below_the_noise(run_seconds, rate, copy, noise):
    noise[1] = 1.0
    assume(run_seconds > 1e-3 * 512 / rate)  # below that it is lost in rounding

    def timed(runs: int, size: int, seconds: float) -> list[Timed]:
        return [Timed(runs, size, seconds * one) for one in noise]

    small = timed(1000, 512_000, 1000 * run_seconds + 512_000 / rate)
    large = timed(16, 1 << 20, (1 << 20) / rate)
    found = probed_costs(small, large, timed(1, 1 << 20, (1 << 20) / copy))
    assert found.run_seconds == pytest.approx(run_seconds, rel=1e-3)
    assert found.wire_bytes_per_second == pytest.approx(rate)
    assert found.chunk_bytes_per_second == found.wire_bytes_per_second
    assert found.copy_bytes_per_second == pytest.approx(copy)


def test_clocks_that_stand_still_divide_by_nothing():
    still = [Timed(1000, 512_000, 0.0)] * 3
    found = probed_costs(still, still, still)
    assert min(vars(found).values()) > 0
    found = measured_costs(found, still, still)
    assert min(vars(found).values()) > 0


@given(COSTS, COSTS, st.integers(1, 1 << 16), st.integers(1, 1 << 16), SIZES)
def test_whatever_is_believed_reads_come_to_rest_at_a_way(start, real, blocks, parts, size):
    """The faster one; or the one whose other is believed to be slower, and was never tried."""
    runs = blocks * parts
    took = {
        "direct": direct_seconds(real, runs, size),
        "staged": staged_seconds(real, blocks, size, size),
    }
    reads: dict[str, list[Timed]] = {"direct": [], "staged": []}

    def choose() -> str:
        costs = measured_costs(start, reads["direct"], reads["staged"])
        direct, staged = (
            direct_seconds(costs, runs, size),
            staged_seconds(costs, blocks, size, size),
        )
        return "direct" if direct <= staged else "staged"

    for _ in range(6):  # three of each at most
        way = choose()
        copied = size / real.copy_bytes_per_second if way == "staged" else 0.0
        reads[way].append(Timed(runs if way == "direct" else blocks, size, took[way], copied, size))
    last = choose()
    other = "staged" if last == "direct" else "direct"
    if len(reads[other]) == 3 and len(reads[last]) == 3:
        assume(blocks * real.run_seconds < 0.01 * took["staged"])
        assume(blocks * took["direct"] < 0.01 * took["staged"] * runs)
        assert took[last] <= 1.1 * took[other]
    else:
        assert len(reads[last]) >= 3
