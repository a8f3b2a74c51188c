"""Digests compared: what is said of which heads and tokens; and their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.checks.digests import (
    ROW_WORDS,
    Digests,
    Extent,
    Weights,
    compare,
    ranges_of,
    rows_of,
)
from kvpatch.core.errors import DigestsRefused
from kvpatch.geometry.plane import Content

from .slow_digests import digests_of, proves

pytestmark = pytest.mark.geometry

RANGES = ((0, 16), (16, 32), (32, 40))
KEYS, VALUES = ("a", Content.KEY), ("a", Content.VALUE)


def digests(
    cells: Mapping[tuple[str, Content], Mapping[int, Sequence[int]]],
    ranges: tuple[Extent, ...] = RANGES,
    seed: bytes = b"s",
) -> Digests:
    return digests_of(cells, ranges, seed)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 40))
def test_ranges_are_cut_where_any_other_request_is_cut(first, length, range_tokens):
    ranges = ranges_of(first, first + length, range_tokens)

    covered = [token for start, end in ranges for token in range(start, end)]
    assert covered == list(range(first, first + length))
    for start, end in ranges:
        assert start // range_tokens == (end - 1) // range_tokens
    inner = [end for _, end in ranges[:-1]]
    assert all(border % range_tokens == 0 for border in inner)


def test_what_differs_is_named_in_few_places() -> None:
    theirs = digests({KEYS: {0: [1, 2, 3], 1: [4, 5, 6]}, VALUES: {0: [7, 8, 9], 1: [1, 1, 1]}})
    ours = digests({KEYS: {0: [1, 0, 0], 1: [4, 0, 0]}, VALUES: {0: [0, 8, 0], 1: [1, 1, 1]}})

    found = compare(theirs, ours)

    assert [str(place) for place in found.wrong] == [
        "layer 'a', key of heads 0, 1, tokens 16 to 39",
        "layer 'a', value of heads 0, tokens 0 to 15",
        "layer 'a', value of heads 0, tokens 32 to 39",
    ]
    assert (found.checked, found.unchecked) == (12, ())


def test_what_theirs_does_not_cover_is_unchecked_and_proves_nothing() -> None:
    ours = digests({KEYS: {0: [1, 2, 3], 1: [4, 5, 6]}})
    other_head = digests({KEYS: {0: [1, 2, 3]}, VALUES: {1: [4, 5, 6]}})
    other_range = digests({KEYS: {0: [1, 2, 3], 1: [4, 5, 6]}}, ((0, 16), (16, 32), (32, 41)))

    found = compare(other_head, ours)
    assert [str(place) for place in found.unchecked] == [
        "layer 'a', key of heads 1, tokens 0 to 39"
    ]
    assert (found.wrong, found.checked) == ((), 3)
    found = compare(other_range, ours)
    assert [(place.heads, place.first_token) for place in found.unchecked] == [((0, 1), 32)]
    assert (found.wrong, found.checked) == ((), 4)
    assert proves(other_head, other_head)


def test_nothing_proves_nothing() -> None:
    assert compare(digests({}), digests({})).checked == 0


def test_what_is_not_of_one_request_is_not_compared() -> None:
    one = digests({KEYS: {0: [1, 2, 3]}})

    with pytest.raises(DigestsRefused, match="expected digests of the same seed"):
        compare(one, digests({KEYS: {0: [1, 2, 3]}}, seed=b"t"))


# --- weights ------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(0, 200), st.integers(0, 200))
def test_a_position_has_one_weight_wherever_a_part_begins(first, skip, count):
    weights = Weights(b"a")
    whole = weights.rows(first, first + skip + count)
    part = weights.rows(first + skip, first + skip + count)
    assert np.array_equal(whole[:, skip:], part)
    assert (whole & np.uint64(1)).all()


def test_all_weights_are_unlike() -> None:
    """Of words and tokens, of a few seeds: no two in 15,000 are the same."""
    drawn = [
        series
        for seed in (b"", b"a", b"aa")
        for series in (Weights(seed).words(ROW_WORDS), Weights(seed).rows(0, 2000))
    ]
    numbers = np.concatenate([series.reshape(-1) for series in drawn])
    assert numbers.size > 15_000
    assert np.unique(numbers).size == numbers.size


def test_weights_are_drawn_evenly() -> None:
    """Each bit but the lowest is set in half of them: within six deviations."""
    numbers = Weights(b"even").rows(0, 10_000).reshape(-1)
    for bit in range(1, 64):
        share = float((numbers >> np.uint64(bit) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 6 * 0.5 / numbers.size**0.5


@pytest.mark.parametrize(
    ("row_bytes", "expected"),
    [(1, (1, 1)), (4, (1, 1)), (5, (1, 2)), (4096, (1, 1024)), (4097, (2, 1024))],
)
def test_long_rows_are_cut(row_bytes: int, expected: tuple[int, int]) -> None:
    assert rows_of(row_bytes) == expected


def test_weights_stay_what_they_are() -> None:
    """Both sides may have other releases of kvpatch: to change these numbers breaks their pairs."""
    weights = Weights(b"req-1")
    drawn = [weights.words(2), weights.rows(1000, 1001)]
    assert [[hex(one) for one in series.ravel().tolist()] for series in drawn] == [
        ["0xef335cb540870e1d", "0x283b80458d7a981f"],
        ["0x4e2f784fbd29f6d7", "0x14f195827ec5d049"],
    ]
