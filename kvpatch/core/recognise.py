"""Recognises a build of vLLM that is not listed by its code: which listed release's it is.

What kvpatch leans on in each listed release is written down in ``data/code.json``: of each
definition its fingerprint and the patches that lean on it, or none where all do. A build whose
definitions are all a release's is taken for that release. Where only some patches' have moved,
these are refused and the others applied; where what all lean on has moved, the build is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvpatch.core.errors import ReleaseNotKnown
from kvpatch.core.releases import FACTS, RELEASES, Build, ReleaseFacts
from kvpatch.core.source import ABSENT, BASES, OVERRIDES, Source

DATA = Path(__file__).with_name("data") / "code.json"
#: How many definitions a refusal names.
_NAMED = 4


class Code(NamedTuple):
    """A definition: the module, and the name as :meth:`Source.fingerprint` takes it."""

    module: str
    name: str


class Known(NamedTuple):
    """A definition's fingerprint in a release, and the patches that lean on it; none for all."""

    fingerprint: str
    slugs: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Known:
        """Reads the text that :meth:`__str__` writes."""
        fingerprint, _, slugs = text.partition(" @ ")
        return cls(fingerprint, tuple(slugs.split()))

    def __str__(self) -> str:
        return f"{self.fingerprint} @ {' '.join(self.slugs)}" if self.slugs else self.fingerprint


def recognise(source: Source, version: str) -> Build:
    """Finds the newest release that the code is of, or else the nearest one."""
    releases = [FACTS[release] for release in reversed(RELEASES)]
    for facts in releases:
        if not any(True for _ in _moved(source, facts)):
            return Build(version, facts, by_code=True)
    candidates = [(facts, list(_moved(source, facts))) for facts in releases]
    facts, moved = min(candidates, key=lambda c: (any(not m.slugs for m in c[1]), len(c[1])))
    shared = [str(one) for one in moved if not one.slugs]
    if shared:
        raise ReleaseNotKnown(
            f"vLLM {version} is none of the releases that kvpatch knows ({RELEASES[0]} to "
            f"{RELEASES[-1]}), nor is its code; of {facts.release}, the nearest, differ "
            f"{_listed(shared)}",
            "install one of these releases, or a build with the code of one, which kvpatch doctor "
            f"--against says of a wheel; KVPATCH_GENERATION={facts.release} takes this build for "
            "that release where none of this matters to you",
        )
    reasons: dict[str, list[str]] = {}
    for one in moved:
        for slug in one.slugs:
            reasons.setdefault(slug, []).append(str(one))
    return Build(version, facts, True, {slug: _listed(r) for slug, r in reasons.items()})


def leaning(release: str) -> frozenset[str]:
    """The patches that lean on something in a release: the others are not needed there."""
    return frozenset(slug for known in tables()[release].values() for slug in known.slugs)


@dataclass(frozen=True)
class _Moved:
    """A definition that is not the release's."""

    code: Code
    expected: str
    found: str
    release: str
    slugs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.code.module.replace('.', '/')}.py: {self._how(self.code.name)}"

    def _how(self, name: str) -> str:
        expected, found = (
            "none" if one == ABSENT else f"({', '.join(one.split())})"
            for one in (self.expected, self.found)
        )
        if name.endswith(OVERRIDES):
            method = name.removesuffix(OVERRIDES)
            return f"expected {expected} to override {method}, found {found}"
        if name.endswith(BASES):
            return f"expected {name.removesuffix(BASES)} to be a class of {expected}, found {found}"
        if self.found == ABSENT:
            return f"expected {name}, found none"
        if self.expected == ABSENT:
            return f"expected no {name}, found one"
        if name.isupper():
            return f"expected {name} to be {self.expected}, found {self.found}"
        return f"expected {name} as in {self.release}, found another"


def _moved(source: Source, facts: ReleaseFacts) -> Iterator[_Moved]:
    for code, known in tables()[facts.release].items():
        found = source.fingerprint(*code, facts.package_of(code.module))
        if found != known.fingerprint:
            yield _Moved(code, known.fingerprint, found, facts.release, known.slugs)


@cache
def tables() -> dict[str, dict[Code, Known]]:
    """Reads the definitions that kvpatch leans on in each release.

    The file has each release's changes against the one before.
    """
    tables: dict[str, dict[Code, Known]] = {}
    table: dict[Code, Known] = {}
    changes: dict[str, dict[str, dict[str, str | None]]] = json.loads(DATA.read_text())
    for release, modules in changes.items():
        table = dict(table)
        for module, names in modules.items():
            for name, text in names.items():
                if text is None:
                    del table[Code(module, name)]
                else:
                    table[Code(module, name)] = Known.read(text)
        tables[release] = table
    return tables


def _listed(found: list[str]) -> str:
    more = len(found) - _NAMED
    return "; ".join(found[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
