"""The thread on which copies in host memory are made, beside the thread that reads.

Where a transport reads in the call that posts (shared memory does), a thread that also copies does
one or the other: reads of several chunks would take the sum of both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import current_thread, local

from kvpatch.transfer.cores import use_all_cores
from kvpatch.transfer.nixl import READ_ERRORS

_LOG = logging.getLogger("kvpatch.progress")

_NAME = "kvpatch-copies"


class CopyingThread:
    """The copying thread of one worker, which starts with the first copy.

    Copies are made one by one, in the order of asking. Where it cannot run, since it was stopped
    for example, each copy is made when it is asked for.

    Args:
        wake: called when a copy is over; on the thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._here = local()
        #: None while there is no thread.
        self._executor: ThreadPoolExecutor | None = None
        self._is_stopped = False

    @property
    def is_current(self) -> bool:
        """True if it is the thread that asks."""
        return getattr(self._here, "is_it", False)

    def copy(self, write: Callable[[], None]) -> Copy:
        future = self._submitted(partial(_make, write))
        if future is not None:
            future.add_done_callback(lambda _: self._wake())
            return Copy(self, future)
        future = Future()
        try:
            write()
            future.set_result(None)
        except READ_ERRORS as error:  # the read's, as if the thread had met it
            future.set_exception(error)
        return Copy(self, future)

    def settle(self) -> None:
        """Waits until all that was handed over is done; the next copy starts the thread anew."""
        if self.is_current:
            return
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def stop(self) -> None:
        """Ends it for good; no copy is under way when this returns."""
        self._is_stopped = True
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=not self.is_current)

    def _submitted(self, task: Callable[[], None]) -> Future[None] | None:
        """Hands a task over; None where no thread makes it."""
        if self._is_stopped:
            return None
        try:
            if self._executor is None:
                executor = ThreadPoolExecutor(1, _NAME, partial(_begin, self._here))
                # A pool that gets no thread keeps the task, and this one may run at any time.
                executor.submit(_nothing)
                self._executor = executor
            return self._executor.submit(task)
        except RuntimeError:  # the interpreter ends, or there are no threads any more
            _LOG.exception("the thread that copies cannot start: the one that reads does")
            self._is_stopped = True
            return None


class Copy:
    """A copy that was handed over. Called, it says whether it is over, or raises its error."""

    def __init__(self, thread: CopyingThread, future: Future[None]) -> None:
        self._thread = thread
        self._future = future

    def __call__(self) -> bool:
        if self._future.cancelled():
            return True
        if not self._future.done():
            return False
        error = self._future.exception()
        if error is None:
            return True
        if isinstance(error, READ_ERRORS):
            raise error
        raise RuntimeError(f"a copy ended in what no copy raises: {error!r}") from error

    def give_up(self) -> None:
        """Leaves it undone if it has not begun; else waits for it."""
        # What is collected in the middle of a copy may let go of the read that it belongs to.
        if not (self._future.cancel() or self._thread.is_current):
            wait([self._future])


def _begin(here: local) -> None:
    here.is_it = True
    current_thread().name = _NAME  # without the number of the pool's
    use_all_cores()


def _make(write: Callable[[], None]) -> None:
    import torch

    # Caches that were made in this mode can be written to in it alone.
    with torch.inference_mode():
        write()


def _nothing() -> None:
    """Does nothing, to see that all before it is done."""
