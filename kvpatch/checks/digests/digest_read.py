"""Fetches what a rank of P has written down of a request's digests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from kvpatch.checks.digests.digest_table import ENTRY_BYTES, DigestTable, Entry, entry_address
from kvpatch.checks.tables import TableRead
from kvpatch.core.errors import NoDigest
from kvpatch.transfer.patience import PAUSE_SECONDS, Patience

#: P makes digests in a step after it has answered, and in a thread. Polls of each of: P has not
#: written them, what is on its way does not come, there is no place for it to land.
_MOST_POLLS = 5000
#: Looks at an entry whose digests are not those that it says: it may have been about to change.
_MOST_LOOKS = 3


@dataclass(eq=False)
class DigestRead(TableRead[DigestTable]):
    """Of one request, from one rank of a peer."""

    _entry: Entry | None = field(default=None, init=False)
    _looks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._patience = Patience(_MOST_POLLS)

    def answer(self, nixl: Any) -> bytes | None:
        """The digests; None until they are here.

        Args:
            nixl: the agent, as the thread may use it that calls this.

        Raises:
            NoDigest: there are none, or they have not come for long.
            Exception: NIXL's.
        """
        now = time.monotonic()
        while self._handle is not None or (now >= self._next and self._begin(nixl)):
            state = nixl.check_xfer_state(self._handle)
            if state == "PROC":
                break
            self._let_go(nixl)
            if state != "DONE":
                raise NoDigest(f"{self.agent}: the digest of a request could not be read: {state}")
            entry = self._entry
            if entry is None:
                self._look(now)
                continue
            content = self._checked(entry)
            if content is not None:
                self._leave()
                return content
        if self._handle is None:
            self._leave()  # others have something to fetch while this one waits
        if self._patience.is_over():
            raise NoDigest(
                f"{self.agent}: its digest of a request has not come: it is not written, or many "
                "others are on their way"
            )
        return None

    def _begin(self, nixl: Any) -> bool:
        """Reads the entry, and then what it tells of; whether there is room for it here."""
        if self._landing is None:
            self._landing = self.table.take_landing()
        if self._landing is None:
            return False
        entry = self._entry
        remote = entry_address(self.remote_table, self.generation)
        local, size = self.table.entry_address(self._landing), ENTRY_BYTES
        if entry is not None:
            remote = self.remote_table + entry.start
            local, size = self.table.content_address(self._landing), entry.size_bytes
        self._post(nixl, remote, local, size)
        return True

    def _look(self, now: float) -> None:
        if self._landing is None:
            return
        entry = self.table.entry(self._landing)
        if entry.says(self.generation):
            self._entry = entry
        elif entry.is_to_come(self.generation):
            self._next = now + PAUSE_SECONDS
        else:
            raise NoDigest(f"{self.agent} has no digest of a request, or none any more")

    def _checked(self, entry: Entry) -> bytes | None:
        if self._landing is None:
            return None
        content = self.table.content(self._landing, entry.size_bytes)
        if entry.fits(content):
            return content
        self._entry = None
        self._looks += 1
        if self._looks >= _MOST_LOOKS:
            raise NoDigest(f"{self.agent} has written other digests over those of a request")
        return None
