"""What a peer's own reads took, by which the way of its next ones is chosen.

Reads that go on at the same time share wire and cores, so that each looks slower than it is. They
are therefore timed together, as one: from when the first begins, none being under way, to when the
last ends, or, where they never cease, to when many have ended for each that goes on. What they read
in all, by that time, is what this worker gets out of the peer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvpatch.geometry.direct_or_staged import Costs
from kvpatch.geometry.measured_costs import Timed, measured_costs

#: Of each way.
_RECENT = 5
#: After so long a way that was found to be slower may be tried again.
_EXPIRE_SECONDS = 600.0
#: What is less than both tells how long a round takes, and not what its bytes do.
_LEAST_BYTES = 1024**2
_LEAST_RUNS = 1024
#: Reads that have ended for each that is still under way when a measurement is taken.
_MANY = 8


class ReadTimes:
    """One peer's: a few of each way."""

    def __init__(self) -> None:
        # Added to by the thread that reads, while the engine's own chooses: replaced as a whole.
        self._direct: tuple[tuple[float, Timed], ...] = ()
        self._staged: tuple[tuple[float, Timed], ...] = ()

    def add(self, found: Timed, *, is_direct: bool) -> None:
        """Books what was measured; the oldest goes."""
        if found.size_bytes < _LEAST_BYTES and found.runs < _LEAST_RUNS:
            return
        booked = (time.monotonic(), found)
        if is_direct:
            self._direct = (*self._direct, booked)[-_RECENT:]
        else:
            self._staged = (*self._staged, booked)[-_RECENT:]

    def costs(self, start: Costs) -> Costs:
        """Costs by which the next read's way is chosen.

        Args:
            start: what holds where nothing was measured.
        """
        if not (self._direct or self._staged):
            return start
        return measured_costs(start, _recent(self._direct), _recent(self._staged))


def _recent(booked: Sequence[tuple[float, Timed]]) -> list[Timed]:
    now = time.monotonic()
    return [found for since, found in booked if now - since < _EXPIRE_SECONDS]


class Stopwatch:
    """One worker's: times those of its reads together that go on at the same time."""

    def __init__(self) -> None:
        self._going: set[int] = set()
        self._since = 0.0
        #: The first that has ended, with all that the others have read; and how many these are.
        self._whole: Metered | None = None
        self._ended = 0
        self._is_spoiled = False

    def begin(self, read: Metered) -> None:
        """A read has begun."""
        if not self._going:
            self._start_anew()
        self._going.add(id(read))

    def end(self, read: Metered, *, is_well: bool) -> None:
        """A read is over; a second time, or of one that never began, this does nothing.

        Args:
            is_well: all of it was read.
        """
        if id(read) not in self._going:
            return
        self._going.discard(id(read))
        whole = self._whole
        # Of two peers, or of two ways, nobody can tell which took how long.
        is_other = whole is not None and (whole.times, whole.ways) != (read.times, read.ways)
        self._is_spoiled |= is_other or not is_well or len(read.ways) != 1
        if whole is None:
            whole = self._whole = read
        else:
            whole.join(read)
        self._ended += 1
        # A busy engine always has one under way: what is under way at the end of so many others,
        # and was at their beginning, is few of them.
        if self._ended < _MANY * len(self._going):
            return
        if not self._is_spoiled:
            seconds = time.monotonic() - self._since
            found = Timed(
                whole.runs, whole.size_bytes, seconds, whole.copy_seconds, whole.copied_bytes
            )
            whole.times.add(found, is_direct=whole.ways == {"direct"})
        self._start_anew()

    def _start_anew(self) -> None:
        self._since, self._whole, self._is_spoiled = time.monotonic(), None, False
        self._ended = 0


class Metered:
    """How much one read reads, for the stopwatch of its worker.

    Args:
        times: of the peer that is read from.
        stopwatch: None where the read goes on in an engine's steps, which are most of its time.
        copied_bytes: what goes through the pool, without what comes along with it.
    """

    def __init__(
        self, times: ReadTimes, stopwatch: Stopwatch | None, copied_bytes: int = 0
    ) -> None:
        self.times = times
        self._stopwatch = stopwatch
        self.ways: set[str] = set()
        self.runs = 0
        self.size_bytes = 0
        self.copied_bytes = copied_bytes
        self.copy_seconds = 0.0

    def begin(self) -> None:
        """It is about to be planned."""
        if self._stopwatch is not None:
            self._stopwatch.begin(self)

    def post(self, runs: int, size_bytes: int, *, is_direct: bool) -> None:
        """So much was posted."""
        self.ways.add("direct" if is_direct else "staged")
        self.runs += runs
        self.size_bytes += size_bytes

    def end(self, *, is_well: bool) -> None:
        """It is over."""
        if self._stopwatch is not None:
            self._stopwatch.end(self, is_well=is_well)

    def join(self, other: Metered) -> None:
        """Counts what another one has read too."""
        self.runs += other.runs
        self.size_bytes += other.size_bytes
        self.copy_seconds += other.copy_seconds
        self.copied_bytes += other.copied_bytes
