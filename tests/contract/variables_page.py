"""docs/reference/variables.md: what the code that reads the variables accepts, in a table."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kvpatch.core import settings
from kvpatch.core.errors import SettingsError

from .tables import ROOT, remade, rows_below

PAGE = ROOT / "docs" / "reference" / "variables.md"

_NONSENSE = "?!"


def names() -> list[str]:
    """The variables that engines read, as the code has them."""
    found = {
        value
        for name, value in vars(settings).items()
        if name.isupper() and isinstance(value, str) and re.match("KVPATCH_|ENABLE_KVPATCH", value)
    }
    return sorted(found - set(settings.TOOLING))


def meanings() -> dict[str, str]:
    """What each is for, as the page says it, in the page's order."""
    return dict(
        re.findall(r"^\| `(\w*KVPATCH\w*)` \| .* \| .* \| (.*) \|$", PAGE.read_text(), re.M)
    )


def page() -> str:
    """The whole document."""
    rows = [(f"`{name}`", *_asked(name), meaning) for name, meaning in meanings().items()]
    return remade(PAGE, rows_below(("variable", "values", "default", "meaning"), rows))


def _asked(name: str) -> tuple[str, str]:
    """(values, default), by what the reader of a variable makes of nonsense and of nothing."""
    for reader in _readers():
        with _environment({}):
            default = reader()
        with _environment({name: _NONSENSE}):
            try:
                found = reader()
            except SettingsError as error:
                if str(error).startswith(f"{name}="):
                    return _values(str(error)), _shown(default)
            else:
                if _NONSENSE in (found if isinstance(found, tuple) else (found,)):
                    return "text", _shown(default)
    raise LookupError(f"nothing reads {name}")


def _readers() -> Iterator[Callable[[], Any]]:
    for name, function in vars(settings).items():
        if inspect.isfunction(function) and not name.startswith("_"):  # noqa: SIM102
            if not inspect.signature(function).parameters:
                yield function


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("KVPATCH_", "ENABLE_KV"))}
    with mock.patch.dict(os.environ, kept | variables, clear=True):
        yield


def _values(complaint: str) -> str:
    found = re.search(r" is (?:not one of|not|neither) ([^:]+)", complaint)
    if found is None:
        raise LookupError(f"no values in {complaint!r}")
    words = found[1].replace(" nor ", ", ")
    return words if words.startswith("a ") else f"`{'`, `'.join(words.split(', '))}`"


def _shown(default: object) -> str:
    if default in (None, (), ""):
        return "unset"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int):
        return f"`{default}` ({default >> 20} MiB)"
    return f"`{default}`"
