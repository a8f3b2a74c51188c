"""The thread on which a worker's reads go on between the engine's steps.

A decode engine looks at its transfers once a step. A read that needs several posts (chunks
through the staging pool, runs up to a bounded length) would stand still from one step to the next:
with steps of 40 ms and a pool of 256 MiB no faster than 6 GB/s, whatever the network.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock, RLock, Thread, current_thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from kvpatch.transfer.agent_gate import AgentGate, EngineLock
from kvpatch.transfer.copying_thread import CopyingThread
from kvpatch.transfer.cores import cores_of_all_threads, use_all_cores
from kvpatch.transfer.one_memory import streams_of
from kvpatch.transfer.own_read import OwnRead, Telemetry
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.transfer.storageless import StoragelessCaches

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.progress")

#: Devices whose copies are known to run beside the model when another thread asks for them.
_DEVICES = ("cpu", "cuda")
#: How long it waits for a transfer before it looks again: at first, and at most.
_FIRST_WAIT_SECONDS = 3e-5
_LONGEST_WAIT_SECONDS = 1e-3
_LONGEST_REST_SECONDS = 2e-2
#: So often each read is looked at, whatever it waits for.
_SURELY_SECONDS = 2.0
#: It ends when there was nothing to read for so long.
_IDLE_SECONDS = 10.0
_STEP_ASIDE_SECONDS = 2e-5
#: Reads whose states alone take long to ask for; of few, NIXL's calls and copies are longer, and
#: let go of the interpreter's lock.
_MANY = 8
#: Without a pause, in which a step may get the interpreter's lock.
_LONGEST_WORK_SECONDS = 1e-3
_STOP_SECONDS = 10.0


def can_read_beside(device: torch.device, caches: object = None) -> bool:
    """True if another thread than the engine's can place what was read on a device.

    Args:
        caches: what places it, where torch does not.
    """
    if isinstance(caches, StoragelessCaches) or device.type not in _DEVICES:
        return False
    return device.type == "cpu" or streams_of(device) is not None


class ProgressThread:
    """The progress thread of one worker; starts with the first read, and ends when idle for long.

    Where it cannot run (it was stopped, an error ended it) each read goes on when it is asked for
    its state.

    Args:
        pool: of the reads; nobody else uses it.
        device: where reads are placed.
        gate: of the agent that they use.

    Attributes:
        copying: the thread that copies what was read; None where this one does.
    """

    def __init__(self, pool: StagingPool, device: torch.device, gate: AgentGate) -> None:
        self._pool = pool
        self._device = device
        self._gate = gate
        #: (read, True) of those to begin with, (read, False) of those that nobody wants any more.
        self._messages: deque[tuple[StagedRead, bool]] = deque()
        #: Released to wake the thread up. Python's own queues do not do: up to Python 3.12 a
        #: `SimpleQueue` may wait for ever in spite of a timeout, and a `Queue` for itself, where
        #: what is collected in the middle of a `put` puts something too.
        self._bell = Lock()
        self._bell.acquire()
        self.copying: CopyingThread | None = None
        if device.type == "cpu" and len(cores_of_all_threads()) > 1:
            self.copying = CopyingThread(self.wake)
        #: All that are not over, and those among them that do not wait for others.
        self._reads: dict[int, StagedRead] = {}
        self._going: dict[int, StagedRead] = {}
        #: When all of them were last looked at.
        self._saw_all = 0.0
        self._called: deque[int] = deque()
        #: Held while something is done for a read.
        self._work = EngineLock()
        #: When it last gave up the interpreter's lock of its own accord.
        self._rested = 0.0
        self._start = RLock()
        self._thread: Thread | None = None
        #: Whether it takes care of the reads that were added; each step asks for each read.
        self.is_running = False
        #: For good, and for now.
        self._is_stopped = self._is_ending = False

    def wake(self) -> None:
        """Makes the thread look again. Never waits; any thread may call it, a collector too."""
        try:
            self._bell.release()
        except RuntimeError:  # it was released already, and nobody has taken it since
            return

    def _tell(self, read: StagedRead, *, is_wanted: bool) -> None:
        self._messages.append((read, is_wanted))
        self.wake()

    def add(self, read: StagedRead) -> None:
        self._tell(read, is_wanted=True)
        with self._start:
            if self._thread is not None or self._is_stopped:
                return
            # Whoever was called while there was no thread is among these.
            self._going = dict(self._reads)
            self._pool.called = self._called
            self._thread = Thread(target=self._run, name="kvpatch-reads", daemon=True)
            self.is_running = True
            try:
                self._thread.start()
            except RuntimeError:
                _LOG.exception("the thread that reads cannot start: the engine's steps take over")
                self._is_stopped, self.is_running = True, False

    def drop(self, read: StagedRead) -> None:
        """Makes the progress thread let go of a read that no step polls. Any thread may call it."""
        self._tell(read, is_wanted=False)

    def paused(self) -> AbstractContextManager[None]:
        """Keeps the progress thread from all reads while inside; copies that it handed over go on.

        For an engine's thread.
        """
        return self._work.first()

    def go_on_with(self, read: StagedRead) -> str:
        """A read's state, after doing what can be done; inside :meth:`paused`, without a thread."""
        self._pool.called = None  # nobody takes them out
        self._called.clear()
        self._book_all()
        state = read.state()
        if state != "PROC":
            self._forget(read)
        return state

    def rest(self) -> None:
        """Ends it until the next read is added; no copy is under way when it returns."""
        self._end()
        with self.paused():
            for read in tuple(self._reads.values()):
                read.settle()
        if self.copying is not None:
            self.copying.settle()
        with self._start:
            if self._thread is None or not self._thread.is_alive():
                self._thread, self._is_ending = None, False

    def stop(self) -> None:
        """Ends it; reads that are not done go on when they are asked for their state."""
        self._is_stopped = True
        self._end()
        if self.copying is not None:
            self.copying.stop()

    def _end(self) -> None:
        self._is_ending = True
        thread = self._thread
        is_own = thread is current_thread() or (self.copying and self.copying.is_current)
        if thread is None or not self.is_running or is_own:
            return  # what is collected on the thread may be the worker's agent
        self.wake()
        thread.join(_STOP_SECONDS)
        if thread.is_alive():
            _LOG.warning("the thread that reads did not end within %d s", _STOP_SECONDS)

    def _run(self) -> None:
        has_ended = False
        try:
            with self._as_the_engine():
                self._read()
            has_ended = True
        finally:
            if not has_ended:  # of what, Python says
                self._is_stopped = True
                _LOG.error("the thread that reads has failed: the engine's steps take over")
            if self._thread is current_thread():  # and not the one that comes after it
                self.is_running = False

    def _as_the_engine(self) -> AbstractContextManager[Any]:
        """Sets this thread's device, and lets it write to the engine's tensors while inside."""
        import torch

        if self._device.type == "cpu":
            use_all_cores()
        else:
            torch.get_device_module(self._device).set_device(self._device)
            # A launch gives this thread the device's context: NIXL posts from it, and older
            # versions of torch do not bind it in `set_device`.
            torch.zeros(1, device=self._device)
        # Caches that were made in this mode can be written to in it alone.
        mode: AbstractContextManager[Any] = torch.inference_mode()
        return mode

    def _read(self) -> None:
        """Goes round the reads until there is nothing to read."""
        wait = _FIRST_WAIT_SECONDS
        while not self._is_ending:
            self._begin_round()
            came = monotonic()
            if came - self._saw_all >= _SURELY_SECONDS:  # those that wait for others too
                self._saw_all = came
                self._going = dict(self._reads)
            has_moved = self._move()
            if has_moved and not self._messages:
                wait = _FIRST_WAIT_SECONDS
                continue
            # No more than a part of the time is spent on asking, however many there are. A round
            # may also have taken long because it had to wait for somebody.
            asking = min(3 * (monotonic() - came), _LONGEST_REST_SECONDS)
            wait = max(min(1.5 * wait, _LONGEST_WAIT_SECONDS), asking)
            if not self._reads:
                wait = _IDLE_SECONDS
            if not self._take(wait) and not self._reads:
                with self._start:
                    if not self._messages:
                        if self.copying is not None:
                            self.copying.settle()
                        self._thread, self.is_running = None, False
                        return

    def _move(self) -> bool:
        """Does one thing for each read that can go on; whether there was any."""
        has_moved, is_long = False, len(self._going) > _MANY
        for key, read in tuple(self._going.items()):
            if is_long and monotonic() - self._rested > _LONGEST_WORK_SECONDS:
                sleep(_STEP_ASIDE_SECONDS)  # who waits for the interpreter's lock gets it
                self._rested = monotonic()
            with self._work.alone(), self._free_for(read) as is_free:
                if not is_free:
                    continue
                has_moved |= read.advance()
                if read.outcome != "PROC":
                    self._forget(read)
                elif read.is_queued:
                    self._going.pop(key, None)
        while self._called:
            called = self._reads.get(self._called.popleft())
            if called is not None and id(called) not in self._going:
                self._going[id(called)] = called
                has_moved = True
        return has_moved

    def _free_for(self, read: StagedRead) -> AbstractContextManager[bool]:
        """Yields True if a read may go on: no memory is registered beside a handshake."""
        # Nor is a handshake waited for: a step that gives a read up would wait too.
        return (
            self._gate.without_handshakes() if read.may_register else nullcontext(enter_result=True)
        )

    def _begin_round(self) -> None:
        """Forgets that it was woken before: what for is seen in this round."""
        self._bell.acquire(blocking=False)

    def _take(self, seconds: float) -> bool:
        """Takes what has come, or comes within a time; True if there was any."""
        if not (self._messages or self._is_ending):
            self._bell.acquire(timeout=seconds)
        return self._book_all()

    def _book_all(self) -> bool:
        has_come = False
        while True:
            try:
                message = self._messages.popleft()
            except IndexError:
                return has_come
            has_come = True
            self._book(*message)

    def _book(self, read: StagedRead, is_wanted: bool) -> None:
        if is_wanted:
            self._reads[id(read)] = self._going[id(read)] = read
            return
        self._forget(read)
        with self._work.alone():
            read.let_go()

    def _forget(self, read: StagedRead) -> None:
        self._reads.pop(id(read), None)
        self._going.pop(id(read), None)


class BackgroundRead(OwnRead):
    """A read that goes on in the progress thread, as the engine's steps see it.

    A step only hears what is done. Giving a read up waits until nothing is placed any more.

    Args:
        read: paced; nobody else knows it.
    """

    def __init__(self, read: StagedRead, thread: ProgressThread) -> None:
        self._read = read
        self.fate = read.fate
        self._thread = thread

    def start(self) -> str:
        self._read.admit()
        self._thread.add(self._read)
        return "PROC"

    def state(self) -> str:
        """Moves the read on here where no progress thread runs."""
        outcome = self.fate.outcome
        if outcome == "PROC" and not self._thread.is_running:
            with self._thread.paused():
                return self._thread.go_on_with(self._read)
        return outcome

    def void(self) -> bool:
        """Voids the read; the progress thread places nothing after this or :meth:`release`."""
        with self._thread.paused():
            return self._read.void()

    def telemetry(self) -> Telemetry | None:
        return self._read.telemetry()

    def release(self) -> None:
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
