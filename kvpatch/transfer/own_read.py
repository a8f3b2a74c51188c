"""The interface of a kvpatch read that a release drives like one of NIXL's transfers."""

from __future__ import annotations

from typing import Any


class Fate:
    """The state of a read.

    It is an object of its own because every step asks it of every read. Of the attributes of a
    thousand reads, few are in the processor's cache.

    Attributes:
        outcome: ``DONE``, ``PROC`` or ``ERR``.
    """

    __slots__ = ("outcome",)

    def __init__(self) -> None:
        self.outcome = "PROC"


class OwnRead:
    """A read of one request in place of a transfer: started, polled for its state, released.

    Each step asks of each transfer whether it is one of these. That takes ten times as long of
    an abstract class, so this is a plain one.

    Attributes:
        owner: what it is read for; nothing here looks at it.
    """

    owner: object = None

    def start(self) -> str:
        raise NotImplementedError

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``; one that has ended stays as it is."""
        raise NotImplementedError

    def void(self) -> bool:
        """Ends it without placing anything more: its blocks may belong to another request.

        The peer is told when nothing is on the wire any more; what was not placed is never
        ``DONE``.

        Returns:
            False where it is done already.
        """
        raise NotImplementedError

    def telemetry(self) -> Any:
        """Returns NIXL's telemetry, summed up over all transfers that the read consisted of."""
        raise NotImplementedError

    def release(self) -> None:
        """Lets go of everything, finished or not; a second time does nothing.

        Raises:
            Exception: NIXL's, where what goes straight to its place cannot be cancelled.
        """
        raise NotImplementedError
