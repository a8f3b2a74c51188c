"""The arguments of an engine, as ``vllm serve --config`` takes them, and what vLLM does not state.

The section ``kvpatch`` of a file says the rest: the release, the device, the attention backend, the
machine and the environment. vLLM refuses entries that it does not know, so the section may stand in
a file beside the one that vLLM takes: ``p.kvpatch.yaml`` beside ``p.yaml``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions
from kvpatch.peer.engine_description import RUNNING
from kvpatch.tools.planning.description import Description, description_in, read_json

SECTION = "kvpatch"
#: The entry of it that holds variables.
ENV = "env"

#: The entries that the section may have.
ABOUT = (
    *("release", "platform", "attention-backend", "amx", "machine"),
    *("api-server", "model-config", ENV, RUNNING),
)
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


@dataclass(frozen=True)
class EngineArguments:
    """The arguments of one engine, as they were written.

    Attributes:
        options: of ``vllm serve``, with underscores.
        about: the section of kvpatch, with hyphens.
        described: the answers of vLLM; None of arguments alone.
    """

    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    described: Description | None = None

    def option(self, name: str, default: Any = None) -> Any:
        """Returns an option of ``vllm serve``; the default where it is not there, or empty."""
        found = self.options.get(name)
        return default if found is None else found

    def number(self, name: str, default: int) -> int:
        """Returns an option that is a whole number; :class:`BadOptions` where it is none."""
        return whole_number(self.option(name, default), f"{self.source}: --{plain(name)}")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Returns an option that is JSON, or a mapping; empty where it is not there."""
        return as_mapping(self.option(name, {}), f"{self.source}: --{plain(name)}")

    def is_on(self, variable: str) -> bool:
        """True if a variable says yes."""
        return self.environment.get(variable, "").strip().lower() in ("1", "true")


def read_arguments(source: str, overrides: Mapping[str, Any] | None = None) -> EngineArguments:
    """Reads an engine's arguments from its file and the section beside it; overrides win.

    Args:
        source: a file, or the URL of a running engine.

    Raises:
        BadOptions: there is no such file, or it holds something else.
    """
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    description = read_json(source)
    if description is not None:
        return _of_description(description, source, given)
    path = Path(source)
    content = _load(path)
    beside = path.with_name(f"{path.stem}.{SECTION}{path.suffix}")
    about = {
        **_section(_load(beside) if beside.exists() else {}, str(beside)),
        **_section(content.pop(SECTION, None), f"{path}: {SECTION}"),
        **given,
    }
    environment = as_mapping(about.pop(ENV, None) or {}, f"{path}: {SECTION}: {ENV}")
    options = {name.lstrip("-").replace("-", "_"): value for name, value in content.items()}
    return EngineArguments(str(path), options, about, _variables(environment))


def _of_description(
    content: Mapping[str, Any], source: str, given: Mapping[str, Any]
) -> EngineArguments:
    """Reads a described engine's; the command line may not contradict them."""
    options, about, env = (
        as_mapping(content.get(name), source) for name in ("options", "about", ENV)
    )
    about = _section(about, source)
    for name, value in given.items():
        if about.setdefault(name, value) != value:
            raise BadOptions(f"{source} describes another {name}", f"leave out --{name}")
    described = description_in(content, source)
    return EngineArguments(source, options, about, _variables(env), described)


def _section(content: Any, where: str) -> dict[str, Any]:
    found = as_mapping(content or {}, where)
    about = {key.replace("_", "-"): value for key, value in found.items()}
    for key in about.keys() - {*ABOUT}:
        hint = f"{nearest(key, ABOUT)}; there are {', '.join(ABOUT)}"
        raise BadOptions(f"{where} has {key!r}, which says nothing here{hint}", "leave it out")
    return about


@cache
def known(what: str) -> frozenset[str]:
    """Returns the names of one kind that a plan knows (known_names.json).

    tests/planning/test_models.py compares each architecture with the caches that vLLM makes of it.
    A plan reads the options and variables, or they change neither the caches nor a transfer.
    """
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


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint in brackets: the known name that is nearest to an unknown one; empty for none."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""


def plain(name: str) -> str:
    """Returns an option's name as it is typed."""
    return name.replace("_", "-")


def whole_number(found: Any, what: str) -> int:
    """Reads a whole number of 1 or more; raises :class:`BadOptions` where it is none."""
    text = str(found).strip()
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise BadOptions(f"{what} is {found!r}: expected a whole number above 0", "write a number")


def as_mapping(found: Any, what: str) -> Mapping[str, Any]:
    """Returns a mapping, or that of a JSON text; raises :class:`BadOptions` for others."""
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise BadOptions(f"{what} is no JSON: {error}", "change it to JSON") from None
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        reason = f"{what} is {found!r:.200}: expected names and values"
        raise BadOptions(reason, "write a mapping, or a JSON object")
    return found


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise BadOptions(
            f"{path} cannot be read: {reason}", "give a YAML file of arguments, or a description"
        ) from None
    if isinstance(content, str):
        reason = f"{path} has a text, {content!r:.80}: expected lines such as `block-size: 128`"
        raise BadOptions(reason, "write a line for each option, or give a command to describe")
    return dict(as_mapping({} if content is None else content, str(path)))


def _variables(found: Mapping[str, Any]) -> dict[str, str]:
    """Variables as a shell has them: YAML takes `true` for another thing than text."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in found.items()
    }
