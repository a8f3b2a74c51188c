"""The processor's cores that this process may use."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_LOG = logging.getLogger("kvpatch.cores")

_TASKS = Path("/proc/self/task")


def cores_of_all_threads() -> set[int]:
    """Returns the cores that any thread of the process may run on; empty where that is unknown."""
    if not _TASKS.is_dir() or not hasattr(os, "sched_getaffinity"):
        return set()
    cores: set[int] = set()
    for task in _TASKS.iterdir():
        try:
            cores |= os.sched_getaffinity(int(task.name))
        except ProcessLookupError:  # it has ended meanwhile
            continue
    return cores


def use_all_cores() -> None:
    """Lets this thread run where any thread of the process may.

    A thread starts on the cores of the one that made it, and on a CPU the connector keeps a
    worker's first thread on one core, which it sets aside for transfers.
    """
    cores = cores_of_all_threads()
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        _LOG.debug("copies stay on the cores of the thread that asks for them: %s", error)
