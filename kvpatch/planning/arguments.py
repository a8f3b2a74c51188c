"""The arguments of an engine, as ``vllm serve --config`` takes them, and what vLLM does not state.

A file's ``kvpatch`` section says the rest: the release, the device, the attention backend, the
machine and the environment. vLLM refuses keys that it does not know, so that a section may stand
in a file of its own beside the one that vLLM takes: ``p.kvpatch.yaml`` beside ``p.yaml``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpatch.core.errors import BadOptions

SECTION = "kvpatch"

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
    "env",
)


@dataclass(frozen=True)
class EngineArguments:
    """One engine's, as they were written.

    Attributes:
        source: the file, for messages.
        options: of ``vllm serve``, with underscores.
        about: the section of kvpatch's own, with hyphens.
        environment: the variables that the engine is started with.
    """

    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

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


def read_arguments(path: Path, overrides: Mapping[str, Any] | None = None) -> EngineArguments:
    """An engine's arguments from its file, and from the section beside it.

    Args:
        overrides: entries of the section that were given otherwise, which win.

    Raises:
        BadOptions: there is no such file, or it holds something else.
    """
    content = _load(path)
    about = dict(as_mapping(content.pop(SECTION, None) or {}, f"{path}: {SECTION}"))
    beside = path.with_name(f"{path.stem}.{SECTION}{path.suffix}")
    if beside.exists():
        about = {**_load(beside), **about}
    about = {key.replace("_", "-"): value for key, value in about.items()}
    about |= {key: value for key, value in (overrides or {}).items() if value is not None}
    for key in about:
        if key not in ABOUT:
            near = difflib.get_close_matches(key, ABOUT, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ABOUT)}"
            raise BadOptions(f"{path}: {SECTION} has {key!r}, which says nothing here; {hint}")
    environment = as_mapping(about.pop("env", None) or {}, f"{path}: {SECTION}: env")
    return EngineArguments(
        source=str(path),
        options={key.lstrip("-").replace("-", "_"): value for key, value in content.items()},
        about=about,
        environment={name: _as_variable(value) for name, value in environment.items()},
    )


def whole_number(found: Any, what: str) -> int:
    """A whole number of 1 or more.

    Raises:
        BadOptions: it is none.
    """
    text = str(found).strip()
    if isinstance(found, bool) or not text.isascii() or not text.isdigit() or int(text) < 1:
        raise BadOptions(f"{what} is {found!r}: expected a whole number of 1 or more")
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
            raise BadOptions(f"{what} is no JSON: {error}") from None
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise BadOptions(f"{what} is {found!r:.200}: expected names and values")
    return found


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadOptions(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise BadOptions(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    return dict(as_mapping({} if content is None else content, str(path)))


def _as_variable(value: Any) -> str:
    """As a shell would have it: YAML takes `true` and `1` for other things than text."""
    return str(value).lower() if isinstance(value, bool) else str(value)
