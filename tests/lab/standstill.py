"""What an engine is doing that does not get on, in words: for a failure that is not seen twice."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from kvpatch.load.reader import Reader

#: Of a thread: the calls in which it is.
_FRAMES = 6


def standstill(workers: Iterable[Any]) -> str:
    """What each of an engine's NIXL workers waits for, and where all of its threads are."""
    lines = [f"rank {rank}: {_of_worker(worker)}" for rank, worker in enumerate(workers)]
    return "\n".join([*lines, *_of_threads()])


def is_idle(worker: Any) -> bool:
    """Whether a NIXL worker has nothing left that could end a load.

    One with kvpatch is never taken for idle: that has queues of its own.
    """
    return not (
        "kvpatch.worker.state" in sys.modules
        or getattr(worker, "_handshake_futures", None)
        or worker._ready_requests.qsize()
        or worker._recving_transfers
        or getattr(worker, "_recving_metadata", None)
    )


def _of_worker(worker: Any) -> str:
    nixl, transfers = worker.nixl_wrapper, dict(worker._recving_transfers)
    found = {
        "knows": sorted(worker._remote_agents),
        "shakes hands with": {
            engine: future.done()
            for engine, future in getattr(worker, "_handshake_futures", {}).items()
        },
        "ready": worker._ready_requests.qsize(),
        "reads": {
            request: [
                _of_transfer(nixl, entry[0] if isinstance(entry, tuple) else entry)
                for entry in entries
            ]
            for request, entries in transfers.items()
        },
        "others": {
            name: sorted(getattr(worker, name))
            for name in ("_recving_metadata", "_reqs_to_send", "_reqs_to_process")
            if hasattr(worker, name)
        },
    }
    return f"{found} {_of_reader(worker)}"


def _of_transfer(nixl: Any, handle: Any) -> str:
    return f"{handle!r:.60}: {nixl.check_xfer_state(handle)}"


def _of_reader(worker: Any) -> str:
    """kvpatch's reads, where it is on."""
    if "kvpatch.worker.state" not in sys.modules:
        return ""
    from kvpatch.worker.state import worker_state

    reader = worker_state(worker).held(Reader)
    thread = None if reader is None else reader.thread
    if thread is None:
        return ""
    with thread.paused():  # what NIXL itself says, which two threads may not ask at once
        reads = [
            {name: str(value)[:200] for name, value in vars(read).items() if name[0] == "_"}
            | {"outcome": read.outcome, "NIXL says": [_said(read, f) for f in read._flights]}
            for read in tuple(thread._reads.values())
        ]
    ago = time.monotonic() - thread._saw_all
    return (
        f"thread runs: {thread.is_running}, goes on: {len(thread._going)}, "
        f"all seen {ago:.1f} s ago, reads: {reads}"
    )


def _said(read: Any, flight: Any) -> str:
    from kvpatch.transfer.nixl import errors_of

    try:
        return str(read._nixl.check_xfer_state(flight.handle))
    except errors_of(read._nixl) as error:  # which is what the read is about to hear
        return repr(error)


def _of_threads() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)[-_FRAMES:])
        for ident, frame in sys._current_frames().items()
    ]
