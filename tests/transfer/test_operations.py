"""How many operations a device is asked for: the count that its time depends on."""

from __future__ import annotations

import pytest

from . import operations


@pytest.mark.parametrize("tokens", [100, 1_000])
def test_layers_are_placed_together(tokens: int) -> None:
    """Another layout, 80 layers: four operations a chunk, where each layer alone takes many."""
    pair = ("LBNHC", 16, "LBHNC", 16)
    assert pair in operations.PAIRS

    found = operations.count(pair, 80, tokens)

    assert found.operations <= operations.MOST * found.chunks
    assert found.operations_alone > 2 * operations.MOST * found.chunks
