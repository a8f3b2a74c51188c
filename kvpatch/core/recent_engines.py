"""Tables by engine id, or by rank, that forget the oldest, for those that nobody else bounds."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TypeVar

V = TypeVar("V")


class RecentEngines(OrderedDict[str, V]):
    """The engines that were booked last."""

    #: More engines than any is fed by at one time; a restarted one has a new id.
    most = 4096

    def __setitem__(self, engine_id: str, value: V) -> None:
        super().__setitem__(engine_id, value)
        self.move_to_end(engine_id)
        while len(self) > self.most:
            self.popitem(last=False)

    def used(self, engine_id: str) -> V | None:
        """Returns an engine's value, as booked anew; None where there is none."""
        found = self.get(engine_id)
        if found is not None:
            with suppress(KeyError):  # another thread has just forgotten it
                self.move_to_end(engine_id)
        return found


class RecentRanks(RecentEngines[V]):
    """The same by what NIXL calls the ranks of engines."""

    most = 1 << 16
