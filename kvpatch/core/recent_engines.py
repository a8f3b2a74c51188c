"""A table by engine id that forgets the oldest, for those that nobody else bounds."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

V = TypeVar("V")

#: More engines than any is fed by at one time; a restarted one has a new id.
MOST_ENGINES = 4096


class RecentEngines(OrderedDict[str, V]):
    """The engines that were booked last."""

    def __setitem__(self, engine_id: str, value: V) -> None:
        super().__setitem__(engine_id, value)
        self.move_to_end(engine_id)
        while len(self) > MOST_ENGINES:
            self.popitem(last=False)
