"""What other threads hand to the one that reads, or copies.

Not Python's own ``SimpleQueue``: up to Python 3.12 its ``get`` waits for ever, in spite of a
timeout, where that is over before the waiting has begun; and a timeout of 30 µs is over where the
system gives the core to somebody else for as long. Nor its ``Queue``, whose ``put`` waits for
itself where what is collected in the middle of one puts something too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from queue import Empty
from threading import Lock
from time import monotonic
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """Items in the order in which they were put; each is taken once, whoever takes it."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        #: Released by who puts; taken by who has found nothing. One release may stand for several
        #: items, or for one that was taken without waiting.
        self._bell = Lock()
        self._bell.acquire()

    def put(self, item: _Item) -> None:
        """Never waits. From any thread, and from whatever is collected in one."""
        self._items.append(item)
        try:
            self._bell.release()
        except RuntimeError:  # it was released already, and nobody has taken it since
            return

    def get(self, seconds: float) -> _Item:
        """The first item, which is waited for.

        Args:
            seconds: for how long at most.

        Raises:
            Empty: there was none.
        """
        ends, left = monotonic() + seconds, seconds
        while True:
            for item in self.taken():
                return item
            if not self._bell.acquire(timeout=max(left, 0)):
                raise Empty
            left = ends - monotonic()

    def taken(self) -> Iterator[_Item]:
        """Items until there are none; none is waited for."""
        while True:
            try:
                item = self._items.popleft()
            except IndexError:
                return
            yield item

    def __len__(self) -> int:
        """How many are to be taken."""
        return len(self._items)
