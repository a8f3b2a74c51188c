"""What digests have said of loads: counted once for each load, whatever it was read from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock

from kvpatch.observe.catalogue import Proof

_LOG = logging.getLogger("kvpatch.digests")


@dataclass(eq=False)
class DigestCounts:
    """Of one worker, since it began; loads that failed for other reasons are not among them.

    Attributes:
        loads: that are what P held, in all of their tokens, or in all of the sample that is asked
            for; in those tokens that could be compared; that were not, and have failed; and that
            no digest says anything of, or nothing of some layer.
        tell: told of each, by whatever thread; of an alarm with the layer that it is told by.
        doubted: peers that owed a digest and did not give it; of each one is told once.
    """

    loads: Counter[Proof] = field(default_factory=Counter)
    tell: Callable[[Proof, str], None] | None = None
    doubted: set[str] = field(default_factory=set)
    #: Loads end on the reads' thread and on the engine's, each under a lock of its own.
    _lock: RLock = field(default_factory=RLock, repr=False)

    def count(self, proof: Proof, layer: str = "") -> None:
        """Books a load.

        Args:
            layer: of an alarm.
        """
        with self._lock:
            self.loads[proof] += 1
        if self.tell is not None:
            self.tell(proof, layer)

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
        #: The engine's thread has all reads booked, and the reads' thread ends them. What is
        #: collected while one of them is inside may be another read of the load, which ends there.
        self._lock = RLock()
        #: Of each read that has ended: how well it was checked; None where it has failed.
        self._ended: list[Proof | None] = []

    def begin(self) -> None:
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

    def end(self, found: Proof | None) -> None:
        """Books how one ended.

        Args:
            found: None of a read that has failed, or was given up.
        """
        with self._lock:
            self._open -= 1
            self._ended.append(found)
            self._count()

    def leave(self, found: Proof | None) -> None:
        """Books a read that nothing checks: as :meth:`begin` and :meth:`end`."""
        self.begin()
        self.end(found)

    def alarm(self, layer: str) -> None:
        """Books wrong bytes, and nothing else of the load.

        Args:
            layer: that has some.
        """
        with self._lock:
            self._open -= 1
            is_first, self._is_counted = not self._is_counted, True
            if is_first:
                self.counts.count(Proof.ALARM, layer)

    def _count(self) -> None:
        is_over = self._is_sealed and self._ended and not self._open
        if self._is_counted or not is_over or None in self._ended:
            return
        self._is_counted = True
        worst = (Proof.UNCHECKED, Proof.PARTLY, Proof.CHECKED)
        self.counts.count(next(found for found in worst if found in self._ended))
