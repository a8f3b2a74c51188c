"""The parts of a read that are still to be posted: direct runs first, then chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvpatch.geometry.direct_plan import Plan
from kvpatch.geometry.segments import Int64Array
from kvpatch.geometry.staged_plan import Chunk

#: Of one post, so that the engine's own calls of NIXL wait for few.
_MOST_RUNS = 8192
#: NIXL spreads a post of so many over the threads that a release asks it for, and reads a smaller
#: one in the thread that posts, where the transport reads by itself (shared memory does).
SPREAD_RUNS = 1024


class Unposted:
    """The queue of the parts of a read that are still to be posted; empty before :meth:`plan`.

    Args:
        direct: runs that go straight to their place; made as they are needed.
        chunks: parts that go through the staging pool; made as they are needed.

    Attributes:
        runs: the next ones that go straight to their places; None where none are left.
        chunk: the next one; None where none is left.
    """

    def __init__(self, direct: Iterable[Plan], chunks: Iterator[Chunk]) -> None:
        self._direct = iter(direct)
        self._chunks = chunks
        self.runs: DirectRuns | None = None
        self.chunk: Chunk | None = None

    @property
    def is_any(self) -> bool:
        return self.chunk is not None or self.runs is not None

    def plan(self) -> None:
        """Plans the first runs that go straight to their places, and the first chunk."""
        self.next_runs()
        self.next_chunk()

    def next_runs(self) -> None:
        found = next((plan for plan in self._direct if len(plan)), None)
        self.runs = None if found is None else DirectRuns(found)

    def next_chunk(self) -> None:
        self.chunk = next(self._chunks, None)

    def clear(self) -> None:
        self._direct, self._chunks = iter(()), iter(())
        self.runs = self.chunk = None


class DirectRuns:
    """The runs of a plan that are still to be posted."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._end_bytes = np.cumsum(plan.length)
        self._first = 0

    @property
    def is_over(self) -> bool:
        return self._first >= len(self._plan)

    def take(
        self, most_bytes: int, *, is_spread: bool = True
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(remote address, local address, bytes) of the next runs; one at least.

        Args:
            most_bytes: that they come to together; up to four times as many where that makes
                them enough to be spread.
            is_spread: whether there is anybody to spread them over.
        """
        first = self._first
        begun = int(self._end_bytes[first - 1]) if first else 0
        last = self._end_within(begun + most_bytes)
        if is_spread and last < (many := first + SPREAD_RUNS) <= self._end_within(
            begun + 4 * most_bytes
        ):
            last = many
        end = max(first + 1, min(last, first + _MOST_RUNS))
        self._first = end
        part = slice(first, end)
        return (
            self._plan.remote_address[part],
            self._plan.local_address[part],
            self._plan.length[part],
        )

    def _end_within(self, end_bytes: int) -> int:
        """Counts the runs that come to so many bytes, from the plan's first."""
        return int(np.searchsorted(self._end_bytes, end_bytes, side="right"))
