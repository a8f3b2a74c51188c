"""What a block of each kind of cache holds: the table of kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Holds(Enum):
    """What may be done with a block."""

    ROWS = "rows of tokens"
    """Cut, paired by token, and zeroed behind the last token."""
    WHOLE = "whole blocks"
    """Moved whole, between equal kernel blocks and equal heads; never cut, never zeroed."""


@dataclass(frozen=True)
class Kind:
    """One kind of cache.

    Attributes:
        contents: of a block, in words, for refusals and docs.
    """

    holds: Holds
    contents: str


ROWS = Kind(Holds.ROWS, "rows of tokens")
_INDEXER = Kind(Holds.WHOLE, "an indexer's values of all tokens, then their scales")

#: By the name of the layer's attention backend's class.
BACKENDS: Mapping[str, Kind] = {
    "DeepseekV32IndexerBackend": _INDEXER,
    "Glm5NextIndexerBackend": _INDEXER,
    "DeepseekV32ROCmIndexerBackend": _INDEXER,
}
