"""What of a read is still to be posted: runs that go straight to their places, then chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvpatch.geometry.direct_plan import Plan
from kvpatch.geometry.segments import Int64Array
from kvpatch.geometry.staged_plan import Chunk

#: Of one post, so that the engine's own calls of NIXL wait for few.
_MOST_RUNS = 8192


class Unposted:
    """What is left to post of a read; nothing before :meth:`plan`.

    Args:
        direct, chunks: as for :class:`kvpatch.transfer.staged_read.StagedRead`.

    Attributes:
        runs: those left that go straight to their places; None where none are.
        chunk: the next one; None where none is left.
    """

    def __init__(self, direct: Plan | Callable[[], Plan], chunks: Iterator[Chunk]) -> None:
        self._direct = direct
        self._chunks = chunks
        self.runs: DirectRuns | None = None
        self.chunk: Chunk | None = None

    @property
    def is_any(self) -> bool:
        """Whether something is left."""
        return self.chunk is not None or self.runs is not None

    def plan(self) -> None:
        """Plans what goes straight to its place, and the first chunk."""
        direct = self._direct() if callable(self._direct) else self._direct
        if len(direct):
            self.runs = DirectRuns(direct)
        self.next_chunk()

    def next_chunk(self) -> None:
        """Goes on to the next chunk."""
        self.chunk = next(self._chunks, None)

    def clear(self) -> None:
        """Nothing is left."""
        self.chunk, self._chunks, self.runs = None, iter(()), None


class DirectRuns:
    """What of a plan is still to be posted."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._end_bytes = np.cumsum(plan.length)
        self._first = 0

    @property
    def is_over(self) -> bool:
        """Whether all of them have been posted."""
        return self._first >= len(self._plan)

    def take(self, most_bytes: int | None) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(remote address, local address, bytes) of the next runs; one at least.

        Args:
            most_bytes: that they come to together; None for all that is left.
        """
        first, end = self._first, len(self._plan)
        if most_bytes is not None:
            begun = int(self._end_bytes[first - 1]) if first else 0
            last = int(np.searchsorted(self._end_bytes, begun + most_bytes, side="right"))
            end = max(first + 1, min(last, first + _MOST_RUNS))
        self._first = end
        part = slice(first, end)
        return (
            self._plan.remote_address[part],
            self._plan.local_address[part],
            self._plan.length[part],
        )
