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
from typing import Any, get_args, get_origin, get_type_hints

from kvpatch.core import settings
from kvpatch.core.errors import SEND_ONE, BadOptions
from kvpatch.core.text import shown
from kvpatch.observe import catalogue
from kvpatch.peer.engine_description import (
    KINDS,
    LATENT,
    NUMBER,
    RUNNING,
    SCHEMA,
    Caches,
    Layer,
    unpacked,
)
from kvpatch.tools.engine_report import METRICS, SCHEMES, samples_of, text_of

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
        if name.startswith(settings.OURS) and not name.startswith(_FAMILIES):
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


# --- descriptions of engines, from files and from running engines -------------------------

#: The metric of a running engine that has it.
DESCRIPTION = catalogue.DESCRIPTION.shown_name
#: The cure where it is not there.
NO_DESCRIPTION = (
    "give it ENABLE_KVPATCH=true, vLLM >= 0.29, caches that plan knows and a request to answer, or "
    "use kvpatch describe -- vllm serve MODEL"
)


def check(caches: Caches, source: str) -> None:
    """Raises :class:`BadOptions` for caches that a plan does not know."""
    kinds = {one.kind for one in caches.layers}
    shapes = {
        (one.kind == LATENT, one.kv_heads, one.head_dim, one.value_dim, one.dtypes)
        for one in caches.attention.values()
    }
    blocks = {one.block_tokens for one in caches.layers}
    backends = {one.backend for one in caches.attention.values()}
    states = {one.parts for one in caches.states.values()}
    found = ""
    if kinds - KINDS or not shapes:
        found = f"caches of {', '.join(sorted(kinds))}"
    elif len(shapes) > 1 or caches.first.value_dim not in (0, caches.first.head_dim):
        found = "layers whose caches have several shapes"
    elif len(blocks) > 1 or len(backends) > 1:
        found = "layers with blocks of several sizes, or with several attention backends"
    elif len(states) > 1 or () in states:
        found = "these recurrent states"
    if found:
        raise BadOptions(f"{source}: not planned for: {found}", SEND_ONE)


@dataclass(frozen=True)
class Description:
    """The answers of vLLM on one engine: its version and factors are those that it hashes."""

    version: str
    caches: Caches
    factors: Mapping[str, Any] | None = None


def read_json(source: str) -> Mapping[str, Any] | None:
    """Returns the description that a file or a running engine has; None of any other file."""
    if source.startswith(SCHEMES):
        content: Any = published_by(source)
    else:
        try:
            path = Path(source)
            content = json.loads(path.read_text("utf-8")) if path.suffix == ".json" else None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            return None  # the reader of arguments says what is wrong
    if not isinstance(content, Mapping) or SCHEMA not in content:
        return None
    if content[SCHEMA] != NUMBER:
        reason = f"{source} is a description of schema {content[SCHEMA]!r}, and not of {NUMBER}"
        raise BadOptions(reason, "write it anew, with one kvpatch")
    return content


def published_by(url: str) -> Mapping[str, Any]:
    """Returns the description in the metrics of a running engine.

    Raises:
        BadOptions: that is no URL, or it has none.
        RequestFailed: it does not answer.
    """
    samples = samples_of(text_of(url, METRICS))
    found = {labels.get("packed", "") for name, labels, _ in samples if name == DESCRIPTION}
    if not found:
        raise BadOptions(f"{url} has no description in its metrics", NO_DESCRIPTION)
    if len(found) > 1:
        raise BadOptions(f"{url} has engines of several descriptions", "give the URL of one engine")
    try:
        return unpacked(found.pop())
    except ValueError as error:
        reason = f"{url} has a description that cannot be read: {error}"
        raise BadOptions(reason, "use one kvpatch for both") from None


def description_in(content: Mapping[str, Any], source: str) -> Description:
    """Reads the caches and the factors of a description."""
    try:
        found, hashed = _as_tuples(content["caches"]), content["hash"]
        layers = tuple(Layer(**one) for one in found["layers"])
        caches = Caches(**{**found, "layers": layers})
        factors = None if hashed is None else dict(hashed["factors"])
        _check_types(caches)
        check(caches, source)
        return Description(str(content["vllm"]), caches, factors)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{source} is no whole description ({error!r:.100})"
        raise BadOptions(reason, "write it anew, and leave it as is") from None


def _check_types(caches: Caches) -> None:
    """Raises ValueError or KeyError for a field of another type, and for a layer in no group."""
    for each in (caches, *caches.layers):
        for name, kind in get_type_hints(type(each)).items():
            if not _is_of(getattr(each, name), kind):
                raise ValueError(f"{name} is {shown(getattr(each, name))}")
    grouped = {number for group in caches.numbered_groups for number in group}
    if len(grouped) < len(caches.layers) or not all(one.dtypes for one in caches.layers):
        raise ValueError("layers without a group or a data type")


def _is_of(value: Any, kind: Any) -> bool:
    """True if a value has a field's type, tuples included; numbers count something."""
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value) if isinstance(value, tuple) else ()
        is_whole = isinstance(value, tuple) and len(value) == len(kinds)
        return is_whole and all(map(_is_of, value, kinds))
    return type(value) is kind and (kind is not int or value >= 0)


def _as_tuples(found: Any) -> Any:
    """Turns the lists of JSON into tuples."""
    if isinstance(found, dict):
        return {name: _as_tuples(one) for name, one in found.items()}
    return tuple(map(_as_tuples, found)) if isinstance(found, list) else found
