"""The architectures, options and variables that a plan knows (known_names.json).

tests/planning/test_models.py compares each architecture with the caches that vLLM makes of it. A
plan reads the options and variables, or they change neither the caches nor a transfer.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions
from kvpatch.tools.planning.arguments import EngineArguments, nearest, plain

#: Options that a description answers by its caches, where both sides have them alike.
ANSWERED = ("disable_sliding_window", "hf_overrides", "kv_cache_dtype_skip_layers")
#: The beginnings of variables that change neither the caches nor a transfer.
_FAMILIES = (
    *("VLLM_ALLREDUCE_", "VLLM_AUDIO_", "VLLM_CPU_", "VLLM_DEEPEP", "VLLM_DP_", "VLLM_IMAGE_"),
    *("VLLM_LOGGING_", "VLLM_MAX_", "VLLM_MEDIA_", "VLLM_MOE_", "VLLM_RAY_"),
    *("VLLM_ROCM_QUICK_REDUCE_", "VLLM_ROCM_USE_AITER", "VLLM_USE_FLASHINFER_MOE_", "VLLM_VIDEO_"),
)
#: The beginnings of variables of vLLM, kvpatch and kvcached; others are not looked at.
_OURS = ("VLLM_", "KVPATCH_", "ENABLE_KV")
_LEAVE_OUT = "leave it out of the file to have the rest planned"
_CORRECT = "write that, or leave it out"
#: Options that vLLM takes behind one hyphen, which no file may have.
_SHORT = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size"}
#: The cure where vLLM itself knows more than a plan.
DESCRIBE = "run kvpatch describe on a machine with that vLLM (>= 0.29) and give its file"


@cache
def known(what: str) -> frozenset[str]:
    """Returns the known architectures, options or variables."""
    text = files("kvpatch.tools.planning").joinpath("known_names.json").read_text("utf-8")
    return frozenset(json.loads(text)[what])


def check_names(arguments: EngineArguments) -> None:
    """Raises :class:`BadOptions` for options and variables that a plan does not take."""
    source = arguments.source
    options = known("options") | {*(ANSWERED if arguments.described else ())}
    for name in (one for one in arguments.options if one.removeprefix("no_") not in options):
        hint = nearest(_SHORT.get(name, plain(name)), map(plain, options))
        cure = _CORRECT if hint else DESCRIBE if name in ANSWERED else _LEAVE_OUT
        if name == "calculate_kv_scales":
            hint = ": each engine computes scales of its own, and they are not sent"
        raise BadOptions(f"{source}: not planned for: --{plain(name)}{hint}", cure)
    variables = known("variables")
    for name in sorted(arguments.environment.keys() - variables):
        if name.startswith(_OURS) and not name.startswith(_FAMILIES):
            hint = "" if name in settings.NAMES else nearest(name, (*settings.NAMES, *variables))
            raise BadOptions(
                f"{source}: not planned for: {name}{hint}", _CORRECT if hint else _LEAVE_OUT
            )
