"""kvcached's own NIXL patch (0.1.6), told from vLLM's code and from anybody else's.

It replaces methods that kvpatch wraps, by functions of other parameters, and keeps what
was there before beside them. What is found is compared by module, name and place, and
kept only where the original is there to be wrapped instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Importing it defines the patch; it is applied as vLLM is imported.
MODULE = "kvcached.integration.vllm.nixl_compat"
PATCH_CLASS = "NixlConnectorPatch"
#: The method of it that replaces the connector's.
APPLY = "patch_connector"

_MISSING: Any = object()
_PREFIX = f"{PATCH_CLASS}.{APPLY}.<locals>."
#: By the replaced method's name: the replacement's own, and where the original is kept.
_REPLACEMENTS = {
    "register_kv_caches": ("_patched_register", "_kvcached_original_register_kv_caches"),
    "get_required_kvcache_layout": ("_kvcached_layout", "_original_get_layout"),
}


def is_theirs(name: str, attribute: object) -> bool:
    """True if a class's own attribute of that name is kvcached's replacement."""
    if name not in _REPLACEMENTS:
        return False
    function = getattr(attribute, "__func__", attribute)
    return (
        getattr(function, "__module__", None) == MODULE
        and getattr(function, "__qualname__", None) == _PREFIX + _REPLACEMENTS[name][0]
    )


def original_of(owner: type, name: str) -> Any:
    """Returns the attribute that kvcached's replacement on a class replaced; None if it is lost."""
    attribute = vars(owner).get(name)
    if not is_theirs(name, attribute):
        return None
    kept: Any = vars(owner).get(_REPLACEMENTS[name][1])
    if isinstance(attribute, classmethod):
        # A classmethod is kept bound.
        return classmethod(kept.__func__) if getattr(kept, "__self__", None) is owner else None
    return kept


def shadows(owner: type, name: str) -> Iterator[type]:
    """Subclasses on which kvcached has put a replacement, in front of the owner's own."""
    kind: type
    for kind in owner.__subclasses__():
        if is_theirs(name, vars(kind).get(name, _MISSING)):
            yield kind
        yield from shadows(kind, name)
