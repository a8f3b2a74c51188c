"""Digests added up and compared: what is said of which heads and tokens, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.checks.digests import Digests, Extent, compare, ranges_of
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
def test_ranges_are_cut_where_any_other_request_is_cut(
    first: int, length: int, range_tokens: int
) -> None:
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
