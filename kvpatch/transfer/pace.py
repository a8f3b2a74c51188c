"""How large the next chunk or post of a read should be."""

from __future__ import annotations


class Pace:
    """Of reads that go on in an engine's steps: follows how long these are apart.

    A small chunk is copied while it is in the processor's cache still. But with the next
    look comes the next chunk, and an engine looks once a step: a reader that is away for
    longer than it works finds chunks that landed long ago, and they double; one that is
    hardly away halves them.

    Args:
        least_bytes, most_bytes: chunks stay between the two.

    Attributes:
        has_threads: whether NIXL's threads share a post of many runs, as far as is known.
    """

    _HARDLY = 0.25

    def __init__(self, least_bytes: int, most_bytes: int) -> None:
        self._least = min(least_bytes, most_bytes)
        self._most = most_bytes
        self.chunk_bytes = min(2 * least_bytes, most_bytes)
        self.has_threads = True

    def looked(self, away_seconds: float, working_seconds: float) -> None:
        """A look that found a chunk: how long it was after the last one, and that one took."""
        if away_seconds > working_seconds:
            self.chunk_bytes = min(2 * self.chunk_bytes, self._most)
        elif away_seconds < self._HARDLY * working_seconds:
            self.chunk_bytes = max(self.chunk_bytes // 2, self._least)
