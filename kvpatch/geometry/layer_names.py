"""Where layers come in their model, by their names."""

from __future__ import annotations

import re


def place_in_model(layer: str) -> tuple[list[int], str]:
    """A layer's, to sort by: the numbers in its name."""
    return [int(number) for number in re.findall(r"\d+", layer)], layer
