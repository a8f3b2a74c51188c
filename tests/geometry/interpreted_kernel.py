"""Brings in Triton's kernels to be run by Triton's interpreter, on a CPU; and compiles them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

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


def compiled(
    kernel: Any, signature: Mapping[str, str], values: Mapping[str, Any], capability: int
) -> str:
    """Compiles a kernel, by the compiler that Triton brings, for a GPU that is not here.

    Returns:
        its assembly.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=triton.JITFunction(kernel.fn),
        signature={**signature, **dict.fromkeys(values, "constexpr")},
        constexprs=dict(values),
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(made.asm["cubin"]) > 1000
    return str(made.asm["ptx"])
