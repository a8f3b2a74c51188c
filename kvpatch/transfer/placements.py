"""The parts of a read that have landed in the staging pool, on the way to their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer.plane_bytes import Tails
from kvpatch.transfer.staging_pool import Space, StagingPool
from kvpatch.transfer.storageless import AnyCaches


class Placements:
    """The copies of one read that are not over. The pool gets their space back when they are.

    Args:
        caches: where they are placed.
        pool: where they have landed.
        errors: what a copy may raise.
    """

    def __init__(
        self,
        caches: AnyCaches,
        pool: StagingPool,
        errors: tuple[type[Exception], ...],
    ) -> None:
        self._caches = caches
        self._pool = pool
        self._errors = errors
        self._copies: list[tuple[Callable[[], bool], Space | None]] = []
        self._after: Any = None

    def __len__(self) -> int:
        return len(self._copies)

    def mark(self) -> None:
        """Orders all copies behind the device work that the engine's thread has queued by now."""
        self._after = self._caches.mark()

    @property
    def may_write(self) -> bool:
        """True once the device has done all that :meth:`mark` recorded."""
        return self._after is None or bool(self._after.query())

    def zero(self, tails: Tails) -> None:
        """Zeroes what no transfer covers.

        Raises:
            Exception: the copy's.
        """
        self._copies.append((self._caches.zero(tails, self._after), None))

    def place(self, space: Space, placements: tuple[Placement, ...]) -> None:
        """Places what has landed in some of the pool.

        Raises:
            Exception: the copy's; the space has been given back.
        """
        try:
            is_placed = self._caches.place(self._pool.memory(space), placements, self._after)
        except self._errors:
            self._caches.settle()
            self._pool.give(space)
            raise
        self._copies.append((is_placed, space))

    def give_back(self) -> bool:
        """Gives back the space of those that are over; whether there was any.

        Raises:
            Exception: a copy's, which is over; those behind it are still to be looked at.
        """
        before = len(self._copies)
        for copy in tuple(self._copies):
            try:
                is_over = copy[0]()
            except self._errors:
                self._end(copy)
                raise
            if is_over:
                self._end(copy)
        return len(self._copies) < before

    def _end(self, copy: tuple[Callable[[], bool], Space | None]) -> None:
        self._copies.remove(copy)
        if copy[1] is not None:
            self._pool.give(copy[1])

    def give_up(self) -> None:
        if self._copies:
            self._caches.give_up(is_placed for is_placed, _ in self._copies)

    def settle(self) -> None:
        if self._copies:
            self._caches.settle()
