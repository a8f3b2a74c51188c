"""What processes share whose forks start with what all of them import."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import signal
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """A hung process must not outlive the tests."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_shared(name: str, own: Collection[str]) -> bool:
    """Whether a module was imported from a file, nothing stands in for it, and forks may share it.

    Args:
        own: packages that each fork imports by itself.
    """
    spec = getattr(sys.modules[name], "__spec__", None)
    if _package(name) in own or spec is None or spec.name != name:
        return False
    return spec.origin is not None and Path(spec.origin).exists()


def import_all(names: Iterable[str], own: Collection[str]) -> None:
    """Imports modules before any fork.

    Raises:
        RuntimeError: with them something of these packages was imported.
    """
    for name in names:
        # What another module imports where something else is there, too.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    wrong = sorted(name for name in sys.modules if _package(name) in own)
    if wrong:
        raise RuntimeError(f"what is a release's own was imported for all of them: {wrong}")
    gc.collect()
    gc.freeze()


def _package(name: str) -> str:
    return name.partition(".")[0]
