"""What the engine's steps see of a read that goes on in the progress thread."""

from __future__ import annotations

import sys
import time

from kvpatch.transfer.own_read import OwnRead
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.telemetry import Telemetry

#: So often the thread is asked for a read that is not over, whatever it waits for.
_SURELY_SECONDS = 2.0


class BackgroundRead(OwnRead):
    """A step only hears what is done. Giving a read up waits until nothing is placed any more.

    Args:
        read: paced; nobody else knows it.
    """

    def __init__(self, read: StagedRead, thread: ProgressThread) -> None:
        self._read = read
        self._thread = thread
        self._is_late = False
        #: When the thread was last asked to look at it.
        self._asked = 0.0

    def start(self) -> str:
        """Hands it to the thread."""
        self._read.admit()
        self._asked = time.monotonic()
        self._thread.add(self._read)
        return "PROC"

    def state(self) -> str:
        """What the thread has come to; without a thread it is done here."""
        read = self._read
        now = read.look()
        if read.outcome != "PROC":
            return read.outcome
        if not self._thread.is_running:
            with self._thread.paused():
                return self._thread.go_on_with(read)
        if read.was_away and not self._is_late:
            self._is_late = True
            self._asked = now - _SURELY_SECONDS  # it may be queued behind others
        if now - self._asked >= _SURELY_SECONDS:
            self._asked = now
            self._thread.add(read)
        return "PROC"

    def void(self) -> bool:
        """As a staged read's; nothing is placed any more when it returns."""
        with self._thread.paused():
            return self._read.void()

    def telemetry(self) -> Telemetry | None:
        """As a staged read's."""
        return self._read.telemetry()

    def release(self) -> None:
        """As a staged read's; nothing is placed any more when it returns."""
        if self._read.holds_nothing:
            return
        with self._thread.paused():
            self._read.release()
        self._thread.drop(self._read)

    def __del__(self) -> None:
        # Wherever the interpreter is: it must not wait for the thread.
        if sys.is_finalizing() or self._read.holds_nothing:
            return
        self._thread.drop(self._read)
