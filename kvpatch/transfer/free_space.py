"""Which bytes of a buffer are taken. Arithmetic only."""

from __future__ import annotations

from typing import NamedTuple


class Space(NamedTuple):
    """Bytes ``start`` to ``end`` of a buffer."""

    start: int
    end: int


class Room:
    """First fit over a buffer of ``size_bytes``; spaces that touch become one again."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free = [Space(0, size_bytes)]
        #: Bytes that are not free.
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> Space | None:
        """The lowest free space of that size; None where there is none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size_bytes:
                rest = Space(start + size_bytes, end)
                self._free[index : index + 1] = [rest] if rest.end > rest.start else []
                self.taken_bytes += size_bytes
                return Space(start, start + size_bytes)
        return None

    def give(self, space: Space) -> None:
        """Frees what :meth:`take` returned.

        Raises:
            ValueError: a part of it is free already.
        """
        free = sorted([*self._free, space])
        joined = [free[0]]
        for start, end in free[1:]:
            last = joined[-1]
            if start < last.end:
                raise ValueError(f"bytes {space.start} to {space.end} are free already")
            if start == last.end:
                joined[-1] = Space(last.start, end)
            else:
                joined.append(Space(start, end))
        self._free = joined
        self.taken_bytes -= space.end - space.start
