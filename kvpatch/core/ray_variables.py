"""Ray's workers are given the variables that vLLM knows; with kvpatch on, ours too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from kvpatch.core import settings

#: The same on every release: the names of the variables that actors are given.
MODULE = "vllm.ray.ray_env"
FUNCTION = "get_env_vars_to_copy"
LEFT_BEHIND = "RAY_NON_CARRY_OVER_ENV_VARS"


def holders(module: ModuleType) -> Iterator[ModuleType]:
    """The module, and vLLM's others that have imported the function from it."""
    function = vars(module).get(FUNCTION)
    if function is None:
        return
    for name, loaded in tuple(sys.modules.items()):
        if name.startswith("vllm.") and vars(loaded).get(FUNCTION) is function:
            yield loaded


def with_ours(wrapped: Callable[..., set[str]], _: Any, *args: Any, **kwargs: Any) -> set[str]:
    """The release's names and ours, but for those that the user leaves behind."""
    left_behind = vars(sys.modules[MODULE]).get(LEFT_BEHIND, set())
    return set(wrapped(*args, **kwargs)) | (set(settings.to_copy()) - set(left_behind))
