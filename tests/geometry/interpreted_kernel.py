"""Brings in Triton's kernel to be run by Triton's interpreter, on a CPU."""

from __future__ import annotations

from types import ModuleType

import pytest


def interpreted_kernel() -> ModuleType:
    """Returns the kernel's module; skips the test where there is no Triton.

    Triton decides how a kernel runs when its module is imported. Nothing else that a test imports
    is to be interpreted.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from kvpatch.transfer import placing_kernel
    return placing_kernel
