"""Each release's own hashing function, taken out of its source and called with a stand-in engine.

The function's code is the release's, and so is what it hashes with; what it is called with are
plain objects with the attributes that it asks for.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from kvpatch.core.releases import FACTS

from . import source
from .relied_on import metadata_module

_HASH = "compute_nixl_compatibility_hash"
#: A stand-in for an engine whose drafter reads the model's states.
DRAFTER = "eagle"
#: What of a stand-in engine is hashed, but for its versions.
ENGINE: dict[str, Any] = {
    "model": "a/model",
    "dtype": "torch.bfloat16",
    "num_kv_heads": 8,
    "head_size": 128,
    "num_hidden_layers": 32,
    "attn_backend_name": "FLASH_ATTN",
    "cache_dtype": "auto",
    "cross_layers_blocks": False,
    "is_hma_enabled": False,
    "speculative_config": None,
    "transfer_mode": "pull",
}


class ReleasedHash:
    """One release's.

    Args:
        release: whose code.
        version: that its vLLM states.
        connector_version: of its connector; None for the release's own.
    """

    def __init__(self, release: str, version: str, connector_version: int | None = None) -> None:
        names = {"logger": SimpleNamespace(debug=lambda *args: None), "Any": Any}
        names["__builtins__"] = {**vars(builtins), "__import__": self._import}
        names["VllmConfig"] = object
        exec(_code(release, metadata_module(FACTS[release])), names)  # noqa: S102
        if connector_version is not None:
            names["NIXL_CONNECTOR_VERSION"] = connector_version
        factors: dict[str, Any] = {"hashlib": hashlib, "json": json}
        exec(_code(release, "vllm.config.utils"), factors)  # noqa: S102
        self._modules = {
            "vllm": SimpleNamespace(__version__=version),
            "vllm.config.utils": SimpleNamespace(hash_factors=factors["hash_factors"]),
        }
        self._hash = names[_HASH]
        self._facts = FACTS[release]

    def _import(self, name: str, *more: Any) -> ModuleType:
        return self._modules[name]  # type: ignore[return-value]

    def of(self, engine: dict[str, Any]) -> str:
        """The hash of an engine, by what its factors are."""
        more = {}
        if "cross_layers_blocks" in self._facts.hash_factors:
            more["cross_layers_blocks"] = engine["cross_layers_blocks"]
        if "transfer_mode" in self._facts.hash_factors:
            more["transfer_mode"] = engine["transfer_mode"]
        found: str = self._hash(_config(engine), engine["attn_backend_name"], **more)
        return found


def _config(engine: dict[str, Any]) -> Any:
    """What the release asks an engine's configuration for."""
    cache_dtype = engine["cache_dtype"]
    model = SimpleNamespace(
        model=engine["model"],
        dtype=engine["dtype"],
        get_total_num_kv_heads=lambda: engine["num_kv_heads"],
        get_head_size=lambda: engine["head_size"],
        get_total_num_hidden_layers=lambda: engine["num_hidden_layers"],
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=not engine["is_hma_enabled"]
        ),
        speculative_config=drafting_of(engine),
    )


def drafting_of(engine: dict[str, Any]) -> Any:
    """A drafter's configuration; None without one."""
    if engine["speculative_config"] is None:
        return None
    draft = SimpleNamespace(
        model="draft/model",
        revision=None,
        code_revision="main",
        hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=(2, 8)),
    )
    return SimpleNamespace(
        use_eagle=lambda: True,
        draft_model_config=draft,
        method="eagle3",
        parallel_drafting=False,
        kv_cache_dtype=None,
    )


@cache
def _code(release: str, module: str) -> Any:
    body = _statements(release, module)
    return compile(ast.Module(body, []), f"{module} of {release}", "exec")


def code_of(release: str) -> list[str]:
    """All that makes a release's hash, but for its constant and for what is said of it."""
    modules = metadata_module(FACTS[release]), "vllm.config.utils"
    found = [node for module in modules for node in _statements(release, module)]
    functions = [node for node in found if isinstance(node, ast.FunctionDef)]
    for function in functions:
        if ast.get_docstring(function) is not None:
            del function.body[0]
    return [ast.unparse(function) for function in functions]


def _statements(release: str, module: str) -> list[ast.stmt]:
    """The functions and the constant that make a hash."""
    tree = ast.parse(source.text(release, module))
    wanted = ("NIXL_CONNECTOR_VERSION", "hash_factors", _HASH)
    helpers = ("_get_speculative_compatibility_factors",)
    return [node for node in tree.body if _name_of(node) in (*wanted, *helpers)]


def _name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return ""
