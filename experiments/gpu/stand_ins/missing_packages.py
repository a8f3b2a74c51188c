"""Stand-ins for what vLLM imports and a GPU machine lacks: packages that no stage uses, which are
empty, and in engines vLLM's compiled kernels.

Python imports this when it starts: run.sh puts it into the environment that it makes, with a .pth.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

_MISSING = frozenset(
    (
        *("anthropic", "av", "compressed_tensors", "cv2", "depyf", "gguf", "ijson", "llguidance"),
        *("lmformatenforcer", "mcp", "mistral_common", "model_hosting_container_standards"),
        *("outlines_core", "partial_json_parser", "prometheus_fastapi_instrumentator", "soundfile"),
        *("watchfiles", "xgrammar"),
    )
)

_COMPILED = frozenset(
    f"vllm.{name}"
    for name in (
        *("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch"),
        "vllm_flash_attn._vllm_fa2_C",
    )
)
#: Set by engines.py in an engine, which vLLM starts processes of.
_KERNELS = "KVPATCH_GPU_STAND_INS"


def _any_schema(cls: type, source: Any, handler: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _Anything(types.ModuleType):
    __path__: list[str] = []
    __version__ = "0"  # older than whatever asks for one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        methods = {
            "__class_getitem__": classmethod(lambda cls, item: cls),
            "__get_pydantic_core_schema__": classmethod(_any_schema),
        }
        made = type(name, (), methods)
        setattr(self, name, made)
        return made


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_kernels = name in _COMPILED and _KERNELS in os.environ
        if not is_kernels and name.split(".")[0] not in _MISSING:
            return None
        return ModuleSpec(name, _Finder, is_package=not is_kernels)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> types.ModuleType:
        if spec.name in _COMPILED:
            importlib.import_module("experiments.gpu.stand_ins.kernels")  # which registers them
        return _Anything(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        return None


sys.meta_path.append(_Finder)  # type: ignore[arg-type] # last: what is installed comes first
