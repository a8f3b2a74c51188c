"""Fetches what a rank of P has written down of a request's digests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpatch.core.errors import NoDigest
from kvpatch.transfer.digest_table import ENTRY_BYTES, DigestTable, Entry, entry_address
from kvpatch.transfer.hold_table import HOST_MEMORY
from kvpatch.transfer.nixl import Ends, prepare_read

#: P makes them in a step after it has answered, and in a thread. As long for each of: P has not
#: written them, a look takes its time, there is no place for a look to land.
_LONGEST_SECONDS = 5.0
#: Between two looks at what is not there yet.
_PAUSE_SECONDS = 1e-3
#: Looks at an entry whose digests are not those that it says: it may have been about to change.
_MOST_LOOKS = 3


@dataclass(eq=False)
class DigestRead:
    """Of one request, from one rank of a peer.

    Args:
        table: this worker's own, where the peer's digests land.
        agent: the peer's rank, as NIXL calls it.
        remote_table: where the rank's table begins.
        generation: the word of the peer's hold.
    """

    table: DigestTable
    agent: str
    remote_table: int
    generation: int
    _landing: int | None = field(default=None, init=False)
    _handle: Any = field(default=None, init=False)
    _entry: Entry | None = field(default=None, init=False)
    _began: float | None = field(default=None, init=False)
    _posted: float = field(default=0.0, init=False)
    _is_without_place: bool = field(default=False, init=False)
    _is_long: bool = field(default=False, init=False)
    _next: float = field(default=0.0, init=False)
    _looks: int = field(default=0, init=False)

    def answer(self, nixl: Any) -> bytes | None:
        """The digests; None until they are here.

        Args:
            nixl: the agent, as the thread may use it that calls this.

        Raises:
            NoDigest: there are none, or they have not come for long.
            Exception: NIXL's.
        """
        now = time.monotonic()
        self._began = self._began or now
        while self._handle is not None or (now >= self._next and self._post(nixl, now)):
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
        if not self._is_late(now, self._began + _LONGEST_SECONDS):
            return None
        if self._handle is not None:
            raise NoDigest(
                f"{self.agent}: its digest of a request has been on its way for "
                f"{_LONGEST_SECONDS:.0f} s"
            )
        if self._is_without_place:
            raise NoDigest(
                f"{self.agent}: there was no place here for its digest of a request to land, as "
                "many others are on their way"
            )
        raise NoDigest(
            f"{self.agent} has not written its digest of a request for {_LONGEST_SECONDS:.0f} s"
        )

    def _is_late(self, now: float, due: float) -> bool:
        """Whether to wait no longer.

        Whoever looks may itself have been held up: a look counts that began when P's time was over,
        and one that is on its way if it still is when it is asked for once more.
        """
        if self._handle is not None:
            was_long, self._is_long = self._is_long, now > max(due, self._posted + _LONGEST_SECONDS)
            return was_long and self._is_long
        return self._posted > due or (self._is_without_place and now > due + _LONGEST_SECONDS)

    def release(self, nixl: Any) -> None:
        """Lets go of what is on its way; what lands late fits no check sum.

        Raises:
            Exception: NIXL's, where it cannot be cancelled.
        """
        self._leave()
        if self._handle is not None:
            self._let_go(nixl)

    def _leave(self) -> None:
        landing, self._landing = self._landing, None
        if landing is not None:
            self.table.give_back(landing)

    def _let_go(self, nixl: Any) -> None:
        handle, self._handle = self._handle, None
        nixl.release_xfer_handle(handle)

    def _post(self, nixl: Any, now: float) -> bool:
        """Reads the entry, and then what it tells of; whether there is room for it here."""
        if self._landing is None:
            self._landing = self.table.take_landing()
        self._is_without_place = self._landing is None
        if self._landing is None:
            return False
        entry = self._entry
        remote = entry_address(self.remote_table, self.generation)
        local, size = self.table.entry_address(self._landing), ENTRY_BYTES
        if entry is not None:
            remote = self.remote_table + entry.start
            local, size = self.table.content_address(self._landing), entry.size_bytes
        self._handle = prepare_read(
            nixl,
            Ends(HOST_MEMORY, HOST_MEMORY, self.agent),
            np.array([remote], dtype=np.uint64),
            np.array([local], dtype=np.uint64),
            np.array([size]),
        )
        nixl.transfer(self._handle)
        self._posted, self._is_long = now, False
        return True

    def _look(self, now: float) -> None:
        if self._landing is None:
            return
        entry = self.table.entry(self._landing)
        if entry.says(self.generation):
            self._entry = entry
        elif entry.is_to_come(self.generation):
            self._next = now + _PAUSE_SECONDS
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
