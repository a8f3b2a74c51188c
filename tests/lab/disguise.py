"""An engine that differs in what its compatibility hash is made of, and in nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from kvpatch.core.releases import FACTS

VERSION = "LAB_VLLM_VERSION"
MODEL = "LAB_MODEL_NAME"
HASH = "LAB_COMPATIBILITY_HASH"
BACKEND = "LAB_BACKEND_NAME"
HYBRID = "LAB_HYBRID"
HEAD_SIZE = "LAB_HEAD_SIZE"


def settings(**values: str) -> tuple[tuple[str, str], ...]:
    """The variables of an engine's process, by the names above in lower case."""
    return tuple((_NAMES[name], value) for name, value in values.items())


_NAMES = {
    "version": VERSION,
    "model": MODEL,
    "hash": HASH,
    "backend": BACKEND,
    "hybrid": HYBRID,
    "head_size": HEAD_SIZE,
}


def take_version() -> None:
    """Has this process's vLLM state another version, before any engine is made."""
    version = os.environ.get(VERSION)
    if version:
        import vllm

        vllm.__version__ = version


def take_connector_version(modules: Iterable[Any]) -> None:
    """Has the connector have the version that comes with the one that is stated."""
    release = os.environ.get(VERSION, "").partition("+")[0]
    for module in modules if release in FACTS else ():
        if hasattr(module, "NIXL_CONNECTOR_VERSION"):
            module.NIXL_CONNECTOR_VERSION = FACTS[release].connector_version


def take_name(config: Any) -> None:
    """Has a model say another name or width of heads, and groups of layers be on or off."""
    name, hybrid, size = (os.environ.get(variable) for variable in (MODEL, HYBRID, HEAD_SIZE))
    if name:
        config.model_config.model = name
    if size:
        object.__setattr__(config.model_config, "get_head_size", lambda: int(size))
    if hybrid:
        config.scheduler_config.disable_hybrid_kv_cache_manager = hybrid == "off"


def backend(found: type[Any]) -> type[Any]:
    """The backend under another name: its tensors stay what they are."""
    name = os.environ.get(BACKEND)
    if not name:
        return found

    class Disguised(found):  # type: ignore[misc, valid-type]
        @staticmethod
        def get_name() -> str:
            return str(name)

    Disguised.__name__, Disguised.__module__ = found.__name__, found.__module__
    return Disguised


def stated(metadata: dict[int, Any]) -> dict[int, Any]:
    """What an engine's workers state, with a hash that is none of theirs."""
    forged = os.environ.get(HASH)
    for found in metadata.values() if forged else ():
        found.compatibility_hash = forged
    return metadata
