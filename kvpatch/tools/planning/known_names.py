"""The options of ``vllm serve`` and the variables that a plan takes (known_names.json).

A plan reads them, or they change neither the caches nor a transfer. Any other one is status 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions, CannotPlan
from kvpatch.tools.planning.arguments import EngineArguments, nearest, plain

#: Options that say which weights there are: other weights make other keys and values.
_OF_WEIGHTS = ("revision", "code_revision", "quantization", "enable_lora", "lora_modules")
#: Options that a description answers by its caches, where both sides have them alike.
_ANSWERED = ("disable_sliding_window", "hf_overrides", "kv_cache_dtype_skip_layers")
#: The beginnings of variables that change neither the caches nor a transfer.
_FAMILIES = ("VLLM_CPU_", "VLLM_DP_", "VLLM_LOGGING_", "VLLM_MOE_", "VLLM_USE_FLASHINFER_MOE_")
#: The beginnings of variables of vLLM, kvpatch and kvcached; others are not looked at.
_OURS = ("VLLM_", "KVPATCH_", "ENABLE_KV")
_LEAVE_OUT = "leave it out of the file to have the rest planned"


@cache
def _known(what: str) -> frozenset[str]:
    text = files("kvpatch.tools.planning").joinpath("known_names.json").read_text("utf-8")
    return frozenset(json.loads(text)[what])


def check_names(arguments: EngineArguments) -> None:
    """Refuses options and variables that a plan does not take.

    Raises:
        BadOptions: a variable of kvpatch's is none.
        CannotPlan: an option, or a variable of vLLM's, is not known.
    """
    source = arguments.source
    options = _known("options") | {*_OF_WEIGHTS} | {*(_ANSWERED if arguments.described else ())}
    for name in sorted({one.removeprefix("no_") for one in arguments.options} - options):
        hint = nearest(plain(name), map(plain, options))
        if name == "calculate_kv_scales":
            hint = ": each engine computes scales of its own, and they are not sent"
        raise CannotPlan(f"{source}: not planned for: --{plain(name)}{hint}", _LEAVE_OUT)
    variables = {settings.ENABLE, *settings.NAMES} | _known("variables")
    for name in sorted(arguments.environment.keys() - variables):
        if not name.startswith(_OURS) or name.startswith(_FAMILIES):
            continue
        hint = nearest(name, variables)
        if name.startswith("VLLM_"):
            raise CannotPlan(f"{source}: not planned for: {name}{hint}", _LEAVE_OUT)
        raise BadOptions(f"{source}: {name} is no variable of kvpatch{hint}", "leave it out")


def check_weights(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> None:
    """Refuses options of weights that differ.

    Raises:
        CannotPlan: one does.
    """
    for name in (*_OF_WEIGHTS, *_ANSWERED):
        theirs, ours = prefill.get(name), decode.get(name)
        if (theirs or None) != (ours or None):
            raise CannotPlan(
                f"not planned for: --{plain(name)} is {theirs} on P and {ours} on D: other weights "
                "make other keys and values, and nothing compares them",
                "give it alike to both sides",
            )
