"""What digests have said of loads: counted once for each load, whatever it was read from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock

_LOG = logging.getLogger("kvpatch.digests")


class Proof(str, Enum):
    """What a digest has said of a load."""

    CHECKED = "checked"
    ALARM = "alarm"
    UNCHECKED = "unchecked"


@dataclass(eq=False)
class DigestCounts:
    """Of one worker, since it began; loads that failed for other reasons are not among them.

    Attributes:
        loads: that are what P held, in all that their digests cover; that were not, and have
            failed; and that no digest says anything of.
        tell: told of each, by whatever thread.
        doubted: peers that owed a digest and did not give it; of each one is told once.
    """

    loads: Counter[Proof] = field(default_factory=Counter)
    tell: Callable[[Proof], None] | None = None
    doubted: set[str] = field(default_factory=set)

    def count(self, proof: Proof) -> None:
        """Books a load."""
        self.loads[proof] += 1
        if self.tell is not None:
            self.tell(proof)

    def doubt(self, agent: str, why: object) -> None:
        """Logs why a load is not checked: the first of a peer's so that it is seen."""
        level = logging.DEBUG if agent in self.doubted else logging.WARNING
        self.doubted.add(agent)
        _LOG.log(level, "a load is not checked by its digest: %s", why)


class LoadProof:
    """Of one load, which is read from one rank or several.

    Args:
        counts: the worker's.
        request_id: as it is logged.
    """

    def __init__(self, counts: DigestCounts, request_id: str) -> None:
        self.counts = counts
        self.request_id = request_id
        self._open = 0
        self._is_sealed = self._is_counted = False
        #: The engine's thread has all reads booked, and the reads' thread ends them.
        self._lock = Lock()
        #: Of each read that has ended: whether it was checked; None where it has failed.
        self._ended: list[bool | None] = []

    def begin(self) -> None:
        """Books a read of it."""
        with self._lock:
            self._open += 1

    def seal(self, *, is_read: bool) -> None:
        """Books that all its reads have been booked.

        Args:
            is_read: whether it is read at all, by whomever.
        """
        with self._lock:
            self._is_sealed = True
            if is_read and not (self._open or self._ended):
                self.counts.count(Proof.UNCHECKED)
            self._count()

    def end(self, *, is_checked: bool | None) -> None:
        """Books how one ended.

        Args:
            is_checked: None of a read that has failed, or was given up.
        """
        with self._lock:
            self._open -= 1
            self._ended.append(is_checked)
            self._count()

    def alarm(self) -> None:
        """Books wrong bytes, and nothing else of the load."""
        with self._lock:
            self._open -= 1
            if not self._is_counted:
                self.counts.count(Proof.ALARM)
            self._is_counted = True

    def _count(self) -> None:
        is_over = self._is_sealed and self._ended and not self._open
        if self._is_counted or not is_over or None in self._ended:
            return
        self._is_counted = True
        self.counts.count(Proof.CHECKED if all(self._ended) else Proof.UNCHECKED)
