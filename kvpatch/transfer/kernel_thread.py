"""Compiles and tries Triton's kernels in a thread of its own.

That takes seconds. Until then torch does a kernel's work, in more launches: no read waits. Whatever
a trial raises leaves the work to torch as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from kvpatch.transfer.cores import use_all_cores
from kvpatch.transfer.one_memory import streams_of

_LOG = logging.getLogger("kvpatch.kernels")

#: How long a caller waits for a kernel; set where its bytes are to be compared.
patience_seconds = 0.0

_tried: dict[tuple[torch.device, Hashable], Future[bool]] = {}
_thread = ThreadPoolExecutor(1, "kvpatch-kernels", use_all_cores)


def is_ready(device: torch.device, kind: Hashable, has_worked: Callable[[], object]) -> bool:
    """True once a kernel has been tried. The first call for each kind begins the trial.

    Args:
        kind: the kernel, and what Triton compiles it anew for.
        has_worked: compiles the kernel and tries it; False for other bytes than torch's.
    """
    key = device, kind
    trial = _tried.get(key)
    if trial is None or (trial.done() and _lacked_memory(trial)):
        trial = _tried[key] = _begin(device, has_worked)
    wait([trial], patience_seconds)
    return _has_passed(trial)


def have_passed() -> bool:
    """True if kernels have been tried, and all of them are used."""
    return bool(_tried) and all(map(_has_passed, _tried.values()))


def noise_on(device: torch.device, size_bytes: int) -> torch.Tensor:
    """Returns the same bytes each time, of which no two blocks are alike, to try a kernel on.

    A device's own random numbers are vLLM's sampler's: each rank has to draw the same.
    """
    noise = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    return torch.from_numpy(noise).to(device)


def _begin(device: torch.device, has_worked: Callable[[], object]) -> Future[bool]:
    try:
        trial = _thread.submit(_try, device, has_worked)
    except RuntimeError:  # no thread is to be had, or the interpreter ends
        never: Future[bool] = Future()
        never.set_result(False)
        return never
    trial.add_done_callback(partial(_tell, device))
    return trial


def _try(device: torch.device, has_worked: Callable[[], object]) -> bool:
    streams = streams_of(device)
    if streams is None:
        return has_worked() is not False
    # Triton compiles for the thread's device. One that has none goes back to the first GPU behind a
    # stream, which makes a context there, of some hundred MiB.
    streams.set_device(device)
    with streams.stream(_stream_of(device)):
        return has_worked() is not False


@cache
def _stream_of(device: torch.device) -> Any:
    """Returns the stream of all trials: torch keeps memory apart for each."""
    return streams_of(device).Stream(device=device)


def _has_passed(trial: Future[bool]) -> bool:
    return trial.done() and trial.exception() is None and trial.result()


def _lacked_memory(trial: Future[bool]) -> bool:
    """True if a trial is to be had again: memory may be free the next time."""
    return isinstance(trial.exception(), torch.OutOfMemoryError)


def _tell(device: torch.device, trial: Future[bool]) -> None:
    error = trial.exception()
    if error is not None:  # what it came through holds a cache, or a piece of one
        error.__traceback__ = error.__cause__ = error.__context__ = None
    if _has_passed(trial) or _lacked_memory(trial):
        return
    why = "it comes to other bytes. Report it with the versions of torch and Triton"
    if error is not None:
        why = f"{type(error).__name__}: {error}"
    _LOG.warning("torch works on %s in place of Triton's kernel: %s", device, why)
