"""Compiles and tries Triton's kernels in a thread of its own.

That takes seconds. Until then torch does a kernel's work, in more launches: no read waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from subprocess import SubprocessError

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
    if trial is None:
        try:
            trial = _tried[key] = _thread.submit(_try, key, has_worked)
        except RuntimeError:  # no thread is to be had, or the interpreter ends
            return False
    wait([trial], patience_seconds)
    return trial.done() and trial.result()


def _try(key: tuple[torch.device, Hashable], has_worked: Callable[[], object]) -> bool:
    from triton.errors import TritonError

    device, streams, why = key[0], streams_of(key[0]), ""
    # The stream's device becomes the thread's: Triton compiles for that.
    beside = nullcontext() if streams is None else streams.stream(streams.Stream(device=device))
    try:
        with beside:
            if has_worked() is False:
                why = "it comes to other bytes. Report it with the versions of torch and Triton"
    except torch.OutOfMemoryError:  # it may be over with the next trial
        _tried.pop(key, None)
        return False
    except (RuntimeError, OSError, SubprocessError, TritonError) as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        _LOG.warning("torch works on %s in place of Triton's kernel: %s", device, why)
    return not why
