"""What each release changed against the one before, from the records of facts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise

from kvpatch.core.releases import FACTS, Place, ReleaseFacts

from .tables import rows_below

_NAMES = ("release", "generation")
_FIELD = re.compile(r"((?:^    #: .*\n)+)^    (\w+): ", re.MULTILINE)


def parts() -> list[tuple[str, str]]:
    """A table of the facts, and one of what changed."""
    facts = [(f"`{name}`", meaning) for name, meaning in meanings().items()]
    rows = [
        (new.release, "; ".join(_changes(old, new)))
        for old, new in pairwise(FACTS.values())
        if _changes(old, new)
    ]
    return [
        rows_below(("fact", "what it says"), facts),
        rows_below(("vLLM", "changed"), rows),
    ]


def meanings() -> dict[str, str]:
    """Each fact in the words of its record."""
    stated = _FIELD.findall(inspect.getsource(ReleaseFacts))
    found = {name: " ".join(words.replace("#: ", "").split()) for words, name in stated}
    return {name: found[name] for name in _fields()}


def _fields() -> list[str]:
    return [field.name for field in fields(ReleaseFacts) if field.name not in _NAMES]


def _changes(old: ReleaseFacts, new: ReleaseFacts) -> list[str]:
    values = ((name, getattr(old, name), getattr(new, name)) for name in _fields())
    return [f"`{name}`{_change(before, now)}" for name, before, now in values if before != now]


def _change(before: object, now: object) -> str:
    """In a few words, behind the fact's name."""
    if isinstance(now, bool):
        return "" if now else " no longer"
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        before, now = (frozenset(f"{n}: {v}" for n, v in one.items()) for one in (before, now))
    if isinstance(before, frozenset | tuple) and isinstance(now, frozenset | tuple):
        before, now = frozenset(before), frozenset(now)
        signs = [f"+{name}" for name in sorted(now - before)]
        return ": " + ", ".join(signs + [f"-{name}" for name in sorted(before - now)])
    if isinstance(now, Place):
        return f": {now.owner}, in {now.module.rpartition('.kv_connector.')[2]}"
    return f": {now}"
