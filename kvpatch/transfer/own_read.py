"""What a release drives like one of NIXL's transfers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class OwnRead(ABC):
    """One request's read, in place of a transfer: started, asked for its state, let go of.

    Attributes:
        owner: what it is read for; nothing here looks at it.
    """

    owner: object = None

    @abstractmethod
    def start(self) -> str:
        """Begins to read; ``PROC``."""

    @abstractmethod
    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``; one that has ended stays as it is."""

    @abstractmethod
    def void(self) -> bool:
        """Ends it without placing anything more: its blocks may belong to another request.

        The peer is told when nothing is on the wire any more; what was not placed is never
        ``DONE``.

        Returns:
            False where it is done already.
        """

    @abstractmethod
    def telemetry(self) -> Any:
        """What NIXL counts of a transfer, summed up over all that it consisted of."""

    @abstractmethod
    def release(self) -> None:
        """Lets go of everything, finished or not; a second time does nothing.

        Raises:
            Exception: NIXL's, where what goes straight to its place cannot be cancelled.
        """
