"""Has a rank of a peer told once, by the last of the reads that are to tell it the same.

P gives a request's blocks away when it has heard that they were read. Two requests of D's may have
one answer of P's (a retry, a router that hedges): what the first reader says would void what the
second still reads, and be said again of blocks that are another request's by then.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock

Told = tuple[str, bytes]
"""NIXL's name of a rank, and what it is told."""


class LastReaders:
    """Of one worker: its open reads, by what they are to tell.

    The engine's thread begins reads, and the reads' own ends them. What is collected in between may
    be a read that nobody has asked for again: it ends inside, on the same thread.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        #: A mark for each read: counts would be wrong where a read ends inside of another's sum.
        self._open: dict[Told, set[object]] = {}
        #: What one of several has to tell, and those that go on will.
        self._owed: set[Told] = set()

    def begin(self, agent: str, message: bytes) -> Callable[[bool], bool]:
        """Books a read that begins.

        Returns:
            Ends it, once: (whether it has something to tell) -> whether it is to be told now.
        """
        told, mark = (agent, message), object()
        with self._lock:
            marks = self._open.setdefault(told, set())
            marks.add(mark)
            self._open[told] = marks  # which may have been the last one's, that has just ended

        def end(has_read: bool) -> bool:  # noqa: FBT001
            with self._lock:
                return self._end(told, mark, has_read=has_read)

        return end

    def leave(self, agent: str, message: bytes) -> bool:
        """Leaves what somebody else has to tell to the reads that go on; False where none does."""
        told = agent, message
        with self._lock:
            if told not in self._open:
                return False
            self._owed.add(told)
            return True

    def _end(self, told: Told, mark: object, *, has_read: bool) -> bool:
        marks = self._open.get(told, set())
        if mark not in marks:
            return False
        marks.discard(mark)
        if marks:
            if has_read:
                self._owed.add(told)
            return False
        self._open.pop(told, None)
        is_owed = told in self._owed
        self._owed.discard(told)
        return has_read or is_owed
