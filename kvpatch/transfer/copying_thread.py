"""The thread on which copies in host memory are made, beside the thread that reads.

Where a transport reads in the call that posts (shared memory does), a thread that also copies does
one or the other: reads of several chunks would take the sum of both.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from queue import Empty
from threading import Lock, RLock, Thread, current_thread

from kvpatch.transfer.cores import use_all_cores
from kvpatch.transfer.inbox import Inbox
from kvpatch.transfer.nixl import READ_ERRORS

_LOG = logging.getLogger("kvpatch.progress")

#: It ends when there was nothing to copy for so long.
_IDLE_SECONDS = 10.0
_STOP_SECONDS = 10.0
#: So often one who waits for a copy looks whether there still is a thread that makes it.
_LOOK_SECONDS = 0.1


class CopyingThread:
    """One worker's; it starts with the first copy and ends when there was none for a while.

    Copies are made one by one, in the order of asking. Where it cannot run (it was stopped, an
    error ended it, a process was forked from this one) each is made when it is asked for.

    Args:
        wake: called when a copy is over; on the thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: Inbox[Copy | None] = Inbox()
        self._start = RLock()
        self._thread: Thread | None = None
        self._is_stopped = False
        self._process = os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether it takes care of the copies that were handed over."""
        return self._thread is not None and not self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether this is another process, in which the thread is not."""
        return os.getpid() != self._process

    @property
    def is_current(self) -> bool:
        """Whether it is the thread that asks."""
        return self._thread is current_thread()

    def copy(self, write: Callable[[], None]) -> Copy:
        """Has something copied.

        Raises:
            Exception: the copy's, where it was made at once.
        """
        copy = Copy(self, write)
        if self.is_forked:  # its locks may be held for ever
            copy.make()
            return copy
        with self._start:
            if is_begun := self._begin():
                self._queue.put(copy)
        if not is_begun:
            copy.make()
        return copy

    def settle(self) -> None:
        """Waits until all that was handed over is done."""
        if self.is_running and not self.is_current:
            last = Copy(self, _nothing)
            self._queue.put(last)
            last.wait()
        if not self.is_running:  # who has ended has left these
            for left in self._queue.taken():
                if left is not None:
                    left.make()

    def rest(self) -> None:
        """Ends it until there is another copy; none is under way when it returns."""
        thread = self._thread
        if thread is not None and not (self.is_forked or self.is_current):
            self._queue.put(None)
            thread.join(_STOP_SECONDS)
            if thread.is_alive():
                _LOG.warning("the thread that copies did not end within %d s", _STOP_SECONDS)
        if not self.is_current:
            self.settle()

    def stop(self) -> None:
        """Ends it for good."""
        self._is_stopped = True
        self.rest()

    def _begin(self) -> bool:
        """Whether there is a thread, which may have begun just now."""
        if self._thread is not None or self._is_stopped:
            return self._thread is not None
        self._thread = Thread(target=self._run, name="kvpatch-copies", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            _LOG.exception("the thread that copies cannot start: the one that reads does")
            self._thread, self._is_stopped = None, True
        return self._thread is not None

    def _run(self) -> None:
        import torch

        has_ended = False
        try:
            use_all_cores()
            # Caches that were made in this mode can be written to in it alone.
            with torch.inference_mode():
                self._copy_all()
            has_ended = True
        finally:
            if not has_ended:  # of what, Python says
                self._is_stopped = True
                _LOG.error("the thread that copies has failed: the one that reads takes over")
                self._thread = None
                self._wake()

    def _copy_all(self) -> None:
        """Copies until it is told to end, or there was nothing to copy for a while."""
        while True:
            try:
                copy = self._queue.get(_IDLE_SECONDS)
            except Empty:
                copy = None
            if copy is not None:
                copy.make()
                self._wake()
                continue
            with self._start:
                if not self._queue:
                    self._thread = None
                    return


class Copy:
    """One that was handed over. Called, it says whether it is over, or raises its error."""

    def __init__(self, thread: CopyingThread, write: Callable[[], None]) -> None:
        self._thread = thread
        self._write = write
        self._error: Exception | None = None
        #: Taken by who makes it or leaves it undone; and by those who wait, when it is over.
        self._claim, self._end = Lock(), Lock()
        self._end.acquire()
        self._is_over = False

    def __call__(self) -> bool:
        """Whether it is over.

        Raises:
            Exception: the copy's own.
        """
        if not (self._is_over or self._thread.is_running):
            self.make()
        if not self._is_over:
            return False
        if self._error is not None:
            raise self._error
        return True

    def make(self) -> None:
        """Makes it, where nobody has begun to."""
        is_first = self._claim.acquire(blocking=False)
        # Who had begun when a process was forked is not in this one.
        if not (is_first or (self._thread.is_forked and not self._is_over)):
            return
        self._error = RuntimeError("a copy ended in what no copy raises; Python has said of what")
        try:
            self._write()
            self._error = None
        except READ_ERRORS as error:  # a read books them, and its thread goes on
            self._error = error
        finally:
            self._finish()

    def wait(self) -> None:
        """Until it is over; its error is raised when it is called."""
        while not self._is_over:
            if not self._thread.is_running:
                self.make()
            elif self._end.acquire(timeout=_LOOK_SECONDS):
                self._end.release()

    def give_up(self) -> None:
        """Leaves it undone where nobody has begun; waits for it where somebody has."""
        if self._is_over:
            return
        if self._claim.acquire(blocking=False) or self._thread.is_forked:
            self._finish()
        elif not self._thread.is_current:  # where what is collected is let go of
            self.wait()

    def _finish(self) -> None:
        self._write = _nothing  # which holds a part of the pool
        self._is_over = True
        self._end.release()


def _nothing() -> None:
    """Of a copy that is over."""
