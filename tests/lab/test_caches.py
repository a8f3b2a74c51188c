"""The lab's own views of caches: a check that writes past their end damages what it checks."""

from __future__ import annotations

import pytest
import torch

from .caches import UnknownShape, rows_of

_BLOCKS, _PAGE_BYTES = 4, 8


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.arange(_BLOCKS * _PAGE_BYTES, dtype=torch.uint8).view(_BLOCKS, _PAGE_BYTES)


def test_rows_are_views(cache: torch.Tensor) -> None:
    rows_of(cache, 2, _PAGE_BYTES, 3)[1] = 99

    assert cache[1].tolist() == [8, 9, 99, 99, 99, 13, 14, 15]
    assert cache.eq(99).sum() == 3


@pytest.mark.parametrize(
    ("start", "width"),
    [
        (0, 2 * _PAGE_BYTES),  # each row would be the next one's, too
        (1, _PAGE_BYTES),  # the last row would end past the storage
        (-1, _PAGE_BYTES),
    ],
)
def test_rows_that_reach_elsewhere(cache: torch.Tensor, start: int, width: int) -> None:
    with pytest.raises(UnknownShape, match=f"rows of {width} bytes, {_PAGE_BYTES} apart"):
        rows_of(cache, start, _PAGE_BYTES, width)
