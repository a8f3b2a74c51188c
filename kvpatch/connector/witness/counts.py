"""What a worker's witness has seen so far, for whoever shows it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvpatch.connector.metrics.book import Book
from kvpatch.connector.metrics.catalogue import (
    ALARM_DISTANCE,
    ALARM_THRESHOLD,
    WITNESS_ALARMS,
    WITNESSED,
    Verdict,
)

_KEPT_ALARMS = 256

#: What an alarm points at: the first layer sees the token alone, later ones the context too.
Suspect = Literal["the last token itself", "the context"]


class Alarm(NamedTuple):
    """A load that the prompt's last token speaks against."""

    request_id: str
    engine_id: str
    layer: str
    content: str
    distance: float
    threshold: float
    suspect: Suspect

    def __str__(self) -> str:
        return (
            f"request {self.request_id}: the {self.content}s of its last prompt token that engine "
            f"{self.engine_id} sent for layer {self.layer} are {100 * self.distance:.3g} % from "
            f"those that D computes ({100 * self.threshold:.3g} % is the most for a good load): "
            f"{self.suspect} may be wrong"
        )


@dataclass
class WitnessCounts:
    """Of one worker.

    Attributes:
        book: of the worker, which shows them.
        witnessed: loads that were compared with thresholds, the alarming ones included.
        learnt: loads that thresholds were learnt from, of which nothing is said.
        alarms: how many of the witnessed ones were alarms.
        enforced: how many of these the scheduler was told of as not loaded.
        not_witnessed: loads by why they could not be looked at.
        latest: the last alarms.
    """

    book: Book
    witnessed: int = 0
    learnt: int = 0
    alarms: int = 0
    enforced: int = 0
    not_witnessed: Counter[str] = field(default_factory=Counter)
    latest: deque[Alarm] = field(default_factory=lambda: deque(maxlen=_KEPT_ALARMS))

    def leave_out(self, cause: str, loads: int = 1) -> None:
        """Counts loads that cannot be looked at."""
        self.not_witnessed[cause] += loads
        self.book.add(WITNESSED, loads, Verdict.NOT_WITNESSED.value)

    def learn(self) -> None:
        """Counts a load of which nothing is said."""
        self.learnt += 1
        self.book.add(WITNESSED, 1, Verdict.LEARNT.value)

    def pass_one(self) -> None:
        """Counts a load that the last token does not speak against."""
        self.witnessed += 1
        self.book.add(WITNESSED, 1, Verdict.GOOD.value)

    def sound(self, alarm: Alarm) -> None:
        """Counts one that it does."""
        self.witnessed += 1
        self.alarms += 1
        self.latest.append(alarm)
        self.book.add(WITNESSED, 1, Verdict.ALARM.value)
        self.book.add(WITNESS_ALARMS, 1, alarm.layer)
        self.book.add(ALARM_DISTANCE, alarm.distance, alarm.layer)
        self.book.add(ALARM_THRESHOLD, alarm.threshold, alarm.layer)
