"""How many operations a device is asked for: the count that its time depends on."""

from __future__ import annotations

import pytest

from kvpatch.transfer import place

from . import operations


@pytest.mark.parametrize("tokens", [100, 1_000])
def test_layers_are_placed_together(tokens: int) -> None:
    """Another layout, 80 layers: four operations a chunk, where each layer alone takes many."""
    pair = ("LBNHC", 16, "LBHNC", 16)
    assert pair in operations.PAIRS

    found = operations.count(pair, 80, tokens)

    assert found.operations <= operations.MOST * found.chunks
    assert found.operations_alone > 2 * operations.MOST * found.chunks


@pytest.mark.parametrize("tokens", [1_000, 15_999])
def test_blocks_that_do_not_divide_each_other_are_placed_together(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 and 64 tokens are cut in four ways: one copy in pieces of 32, and what is left over."""
    pair = ("LBNHC", 96, "LBHNC", 64)
    assert pair in operations.PAIRS
    assert operations.count(pair, 80, tokens).operations_a_chunk <= operations.MOST

    monkeypatch.setattr(place.EvenPieces, "of", lambda pieces, placement: (placement,))
    assert operations.count(pair, 80, tokens).operations_a_chunk > operations.MOST
