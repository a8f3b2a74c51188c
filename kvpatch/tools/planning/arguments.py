"""The arguments of an engine, as ``vllm serve --config`` takes them, and what vLLM does not state.

A file's ``kvpatch`` section says the rest: the release, the device, the attention backend, the
machine and the environment. vLLM refuses keys that it does not know, so that a section may stand
in a file of its own beside the one that vLLM takes: ``p.kvpatch.yaml`` beside ``p.yaml``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpatch.core.errors import BadOptions
from kvpatch.core.version import __version__
from kvpatch.tools.planning.description import (
    NUMBER,
    SCHEMA,
    Description,
    description_in,
    read_json,
)

SECTION = "kvpatch"
#: The entry of it that holds variables.
ENV = "env"

#: What the section may say.
ABOUT = (
    "release",
    "platform",
    "attention-backend",
    "kernel-block-size",
    "amx",
    "machine",
    "model-config",
    "queue-seconds",
    "ray",
    "url",
    ENV,
)

_COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Contradiction:
    """What is written of an engine, and the running engine denies.

    Attributes:
        said_by: the file, or the command line.
        where: the address at which the engine answers it.
    """

    name: str
    written: str
    answered: str
    said_by: str
    where: str


@dataclass(frozen=True)
class Running:
    """What came of asking a running engine.

    Attributes:
        url: of its API server.
        version: as it states it, which is what it hashes.
        misses_kvpatch: whether it should have kvpatch, and shows none.
        misses_connector: whether it shows no NixlConnector.
    """

    url: str
    version: str
    misses_kvpatch: bool = False
    misses_connector: bool = False
    contradictions: tuple[Contradiction, ...] = ()


@dataclass(frozen=True)
class EngineArguments:
    """One engine's, as they were written.

    Attributes:
        source: the file, for messages.
        options: of ``vllm serve``, with underscores.
        about: the section of kvpatch's own, with hyphens.
        environment: the variables that the engine is started with.
        origins: where each of these is from, by its name; of variables behind ``env``.
        assumed: what was taken for granted as they were put together, a sentence each.
        running: of an engine that was asked; None where it is not started yet.
        described: what vLLM has said of it; None of arguments alone.
    """

    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    running: Running | None = None
    described: Description | None = None

    def option(self, name: str, default: Any = None) -> Any:
        """An option of ``vllm serve``; the default where it is not there, or empty."""
        found = self.options.get(name)
        return default if found is None else found

    def number(self, name: str, default: int) -> int:
        """An option that is a whole number of 1 or more.

        Raises:
            BadOptions: it is none.
        """
        found = self.option(name, default)
        return whole_number(found, f"{self.source}: --{name.replace('_', '-')}")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An option that is JSON, or a mapping already; empty where it is not there.

        Raises:
            BadOptions: it is neither.
        """
        return as_mapping(self.option(name, {}), f"{self.source}: --{name.replace('_', '-')}")

    def is_on(self, variable: str) -> bool:
        """Whether a variable says yes."""
        return self.environment.get(variable, "").strip().lower() in ("1", "true")

    def as_description(self, digest: str | None = None) -> dict[str, Any]:
        """For JSON, as :func:`read_arguments` reads it again.

        Args:
            digest: that the hash comes to.
        """
        described = self.described or Description("")
        caches, factors = described.caches, described.factors
        return {
            SCHEMA: NUMBER,
            "kvpatch": __version__,
            "vllm": described.version,
            "url": self.running.url if self.running else None,
            "options": dict(self.options),
            "about": dict(self.about),
            ENV: dict(self.environment),
            "caches": None if caches is None else asdict(caches),
            "hash": None if factors is None else {"digest": digest, "factors": factors},
            "assumed": list(self.assumed),
        }

    def facts(self) -> dict[str, dict[str, Any]]:
        """What is known of the engine, and where from, by name."""
        values = {plain(name): value for name, value in self.options.items()}
        values |= self.about
        values |= {f"{ENV} {name}": value for name, value in self.environment.items()}
        return {
            name: {"value": value, "from": self.origins.get(name, self.source)}
            for name, value in values.items()
            if value is not None
        }


def read_arguments(path: Path, overrides: Mapping[str, Any] | None = None) -> EngineArguments:
    """An engine's arguments from its file, and from the section beside it.

    Args:
        overrides: entries of the section that were given otherwise, which win.

    Raises:
        BadOptions: there is no such file, or it holds something else.
    """
    description = read_json(path)
    if description is not None:
        return _of_description(description, path, overrides or {})
    content = _load(path)
    options = _options({key: content[key] for key in content if key != SECTION}, str(path))
    about = _section(content.get(SECTION), f"{path}: {SECTION}")
    origins = {**dict.fromkeys(map(plain, options), str(path)), **_origins(about, str(path))}
    beside = path.with_name(f"{path.stem}.{SECTION}{path.suffix}")
    if beside.exists():
        further = _section(_load(beside), str(beside))
        origins = {**_origins(further, str(beside)), **origins}
        about = {**further, **about}
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    about |= given
    environment = as_mapping(about.pop(ENV, None) or {}, f"{path}: {SECTION}: {ENV}")
    return EngineArguments(
        source=str(path),
        options=options,
        about=about,
        environment={name: _as_variable(value) for name, value in environment.items()},
        origins={**origins, **dict.fromkeys(given, _COMMAND_LINE)},
    )


def _of_description(
    content: Mapping[str, Any], path: Path, overrides: Mapping[str, Any]
) -> EngineArguments:
    """A described engine's; the command line may not say otherwise."""
    source = str(path)
    parts = {
        name: as_mapping(content.get(name) or {}, f"{path}: {name}")
        for name in ("options", "about", ENV)
    }
    about = _section(parts["about"], source)
    for name, value in overrides.items():
        if value is not None and about.setdefault(name, value) != value:
            raise BadOptions(
                f"{path} describes an engine with {name} {about[name]}, and the command line "
                f"says {value}",
                f"leave out --{name}, or describe another engine",
            )
    url = content.get("url")
    described = description_in(content, path)
    return EngineArguments(
        source=source,
        options=dict(parts["options"]),
        about=about,
        environment={name: _as_variable(value) for name, value in parts[ENV].items()},
        assumed=tuple(map(str, content.get("assumed") or ())),
        running=Running(str(url), described.version) if url else None,
        described=described,
    )


def arguments_given(source: str, overrides: Mapping[str, Any]) -> EngineArguments:
    """Those of an engine of which nothing is written, but what the command line says."""
    about = {key: value for key, value in overrides.items() if value is not None}
    return EngineArguments(source, about=about, origins=dict.fromkeys(about, _COMMAND_LINE))


def _options(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options with underscores; what is written with dots becomes part of a mapping, as in vLLM."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        name, *path = key.lstrip("-").split(".")
        name = name.replace("-", "_")
        if not path:
            found[name] = value
            continue
        inner = found[name] = dict(as_mapping(found.get(name) or {}, f"{where}: {key}"))
        for step in path[:-1]:
            inner[step] = inner = dict(as_mapping(inner.get(step) or {}, f"{where}: {key}"))
        inner[path[-1]] = value
    return found


def _section(content: Any, where: str) -> dict[str, Any]:
    """What a section says, by its names.

    Raises:
        BadOptions: it says what means nothing here.
    """
    found = as_mapping(content or {}, where)
    about = {key.replace("_", "-"): value for key, value in found.items()}
    for key in about:
        if key not in ABOUT:
            near = difflib.get_close_matches(key, ABOUT, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ABOUT)}"
            raise BadOptions(
                f"{where} has {key!r}, which says nothing here; {hint}",
                "write the name that it has, or leave it out",
            )
    return about


def _origins(about: Mapping[str, Any], where: str) -> dict[str, str]:
    found = dict.fromkeys((key for key in about if key != ENV), where)
    variables = about.get(ENV)
    names = variables if isinstance(variables, Mapping) else ()
    return found | {f"{ENV} {name}": where for name in names}


def plain(name: str) -> str:
    """An option's name as it is typed."""
    return name.replace("_", "-")


def whole_number(found: Any, what: str) -> int:
    """A whole number of 1 or more.

    Raises:
        BadOptions: it is none.
    """
    text = str(found).strip()
    if isinstance(found, bool) or not text.isascii() or not text.isdigit() or int(text) < 1:
        raise BadOptions(
            f"{what} is {found!r}: expected a whole number of 1 or more", "write a number"
        )
    return int(text)


def as_mapping(found: Any, what: str) -> Mapping[str, Any]:
    """A mapping, or the one that a text of JSON holds.

    Raises:
        BadOptions: it is neither.
    """
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise BadOptions(f"{what} is no JSON: {error}", "change it to JSON") from None
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise BadOptions(
            f"{what} is {found!r:.200}: expected names and values",
            "write a mapping, or a JSON object",
        )
    return found


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadOptions(
            f"{path} cannot be read: {error}", "give a file with an engine's arguments"
        ) from None
    except yaml.YAMLError as error:
        raise BadOptions(
            f"{path} is no YAML: {' '.join(str(error).split())}", "change that line"
        ) from None
    return dict(as_mapping({} if content is None else content, str(path)))


def _as_variable(value: Any) -> str:
    """As a shell would have it: YAML takes `true` and `1` for other things than text."""
    return str(value).lower() if isinstance(value, bool) else str(value)
