"""The telemetry of NIXL's transfers, summed up over all that a read consisted of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvpatch.transfer.nixl import errors_of


@dataclass
class Telemetry:
    """The telemetry of a read, summed up over its transfers. Times in us.

    Attributes:
        way: the path that the bytes took; nothing here looks at it.
    """

    startTime: int = 0  # noqa: N815 - NIXL's own names
    postDuration: int = 0  # noqa: N815
    xferDuration: int = 0  # noqa: N815
    totalBytes: int = 0  # noqa: N815
    descCount: int = 0  # noqa: N815
    way: str = ""

    @property
    def is_of_nothing(self) -> bool:
        """True if it is of a read of no bytes, which is none that anybody counts."""
        return not self.descCount

    def add(self, one: Any) -> None:
        """Counts another transfer; of the starts the first stays."""
        self.startTime = min(self.startTime or one.startTime, one.startTime)
        self.postDuration += one.postDuration
        self.xferDuration += one.xferDuration
        self.totalBytes += one.totalBytes
        self.descCount += one.descCount


def sum_of(found: Iterable[Any]) -> Telemetry:
    """Sums up the telemetry of several transfers."""
    total = Telemetry()
    for one in found:
        if one is not None:
            total.add(one)
            if isinstance(one, Telemetry):
                total.way = total.way or one.way
    return total


class Tally:
    """Counts the transfers of one read, as far as NIXL does."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self.total = Telemetry()
        #: NIXL's, where the release did not ask it to count.
        self._uncounted: Exception | None = None
        #: Whether NIXL has nothing to say, which a release takes from 0.32 on.
        self._is_silent = False
        #: An old NIXL has no counts at all.
        self._errors: tuple[type[Exception], ...] = (AttributeError, *errors_of(nixl))

    def count(self, handle: Any) -> None:
        """Counts a transfer that is done and not yet released."""
        try:
            if self._uncounted is None and not self._is_silent:
                found = self._nixl.get_xfer_telemetry(handle)
                self._is_silent = found is None
                if found is not None:
                    self.total.add(found)
        except self._errors as error:
            self._uncounted = error

    def telemetry(self) -> Telemetry | None:
        """The sums over all transfers so far; None where NIXL says none of one.

        Raises:
            Exception: NIXL's, where it does not count.
        """
        if self._uncounted is not None:
            raise self._uncounted
        return None if self._is_silent else self.total
