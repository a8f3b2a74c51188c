"""Stand-ins for packages that vLLM imports and that no stage uses: empty, where they are missing.

Python imports this when it starts: run.sh puts it into the environment that it makes, with a .pth.
"""

from __future__ import annotations

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
        if name.split(".")[0] not in _MISSING:
            return None
        return ModuleSpec(name, _Finder, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        return None


sys.meta_path.append(_Finder)  # type: ignore[arg-type] # last: what is installed comes first
