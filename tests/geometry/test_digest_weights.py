"""Weights of a digest: what they depend on, and that they are odd, unlike and evenly drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.checks.digests import ROW_WORDS, Weights, rows_of

pytestmark = pytest.mark.geometry


@given(st.integers(0, 500), st.integers(0, 200), st.integers(0, 200))
def test_a_position_has_one_weight_wherever_a_part_begins(
    first: int, skip: int, count: int
) -> None:
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
