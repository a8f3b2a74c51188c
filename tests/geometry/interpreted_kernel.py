"""Brings in Triton's kernels to be run by Triton's interpreter, on a CPU."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest


def interpreted_kernel(name: str = "kvpatch.transfer.placing_kernel") -> ModuleType:
    """Returns a kernel's module; skips the test where there is no Triton.

    Triton decides how a kernel runs when its module is imported. Nothing else that a test imports
    is to be interpreted.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return import_module(name)
