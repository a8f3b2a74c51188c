"""What of a read has landed in the staging pool, on its way to its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer.free_space import Space
from kvpatch.transfer.plane_bytes import Tails
from kvpatch.transfer.read_times import Metered
from kvpatch.transfer.staging_pool import StagingPool

if TYPE_CHECKING:
    import torch


class Placer(Protocol):
    """:class:`kvpatch.transfer.caches.Caches`, or what stands for it."""

    def mark(self) -> Any:
        """What the engine's thread has told the device by now, which copies come after."""

    def place(
        self, staging: torch.Tensor, placements: tuple[Placement, ...], after: Any
    ) -> Callable[[], bool]:
        """Copies what has landed; what is returned says whether it is done, or raises."""

    def zero(self, tails: Tails, after: Any) -> Callable[[], bool]:
        """Zeroes what no transfer covers; as what has landed is placed."""

    def settle(self) -> None:
        """Waits for every copy that has been asked for."""

    def give_up(self, copies: Iterable[Callable[[], bool]]) -> None:
        """Has nothing more written by these, which place or zero have returned."""


class Placements:
    """One read's copies that are not over. The pool gets their space back when they are.

    Args:
        caches: where they are placed.
        pool: where they have landed.
        errors: what a copy may raise.
    """

    def __init__(
        self, caches: Placer, pool: StagingPool, errors: tuple[type[Exception], ...]
    ) -> None:
        self._caches = caches
        self._pool = pool
        self._errors = errors
        self._copies: list[tuple[Callable[[], bool], Space | None]] = []
        self._after: Any = None
        #: Since when they alone are waited for.
        self._waits_since: float | None = None

    def __len__(self) -> int:
        """How many are not over."""
        return len(self._copies)

    def mark(self) -> None:
        """What the engine's thread has told the device by now comes before all of them."""
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

    def place(self, space: Space, placements: tuple[Placement, ...], metered: Metered) -> None:
        """Places what has landed in some of the pool.

        Raises:
            Exception: the copy's; the space has been given back.
        """
        came = time.monotonic()
        try:
            is_placed = self._caches.place(self._pool.memory(space), placements, self._after)
            if is_placed():
                metered.copy_seconds += time.monotonic() - came
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
        """Has nothing more written by them."""
        if self._copies:
            self._caches.give_up(is_placed for is_placed, _ in self._copies)

    def settle(self) -> None:
        """Waits for all of them."""
        if self._copies:
            self._caches.settle()

    def count_waiting(self, metered: Metered, *, is_reading: bool) -> None:
        """Counts for how long they alone are waited for: what is read beside them costs less."""
        is_waiting = bool(self._copies) and not is_reading
        since = self._waits_since
        if is_waiting == (since is not None):
            return
        now = time.monotonic()
        if since is not None:
            metered.copy_seconds += now - since
        self._waits_since = now if is_waiting else None
