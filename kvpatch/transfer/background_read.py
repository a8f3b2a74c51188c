"""What the engine's steps see of a read that goes on in the progress thread."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvpatch.transfer.own_read import OwnRead
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.telemetry import Telemetry


class BackgroundRead(OwnRead):
    """A step only hears what is done. Giving a read up waits until nothing is placed any more.

    Args:
        read: paced; nobody else knows it.
    """

    def __init__(self, read: StagedRead, thread: ProgressThread) -> None:
        self._read = read
        self.fate = read.fate
        self._thread = thread

    def start(self) -> str:
        """Hands it to the thread."""
        self._read.admit()
        self._thread.add(self._read)
        return "PROC"

    def state(self) -> str:
        """What the thread has come to; without a thread it is done here."""
        outcome = self.fate.outcome
        if outcome == "PROC" and not self._thread.is_running:
            with self._thread.paused():
                return self._thread.go_on_with(self._read)
        return outcome

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

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Wherever the interpreter is: it must not wait for the thread.
        if is_finalizing() or self._read.holds_nothing:
            return
        self._thread.drop(self._read)
