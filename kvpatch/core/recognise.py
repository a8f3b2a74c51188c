"""Recognises a build of vLLM that is not listed by its code: which listed release's it is.

What kvpatch leans on in each listed release is written down in ``data/code.json``: of each
definition its fingerprint and the patches that lean on it, or none where all do. A build whose
definitions are all a release's is taken for that release. Where only some patches' have moved,
these are refused and the others applied; where what all lean on has moved, the build is refused.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple
from zipfile import Path as ZipPath

from kvpatch.core.errors import ReleaseNotKnown
from kvpatch.core.releases import FACTS, RELEASES, Build, ReleaseFacts, listed

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
    """Finds the release that the code is of: its own, or the newest, or else the nearest one."""
    own, releases = listed(version), [FACTS[release] for release in reversed(RELEASES)]
    if own is not None:
        releases.insert(0, own)
    for facts in releases:
        if not any(True for _ in _moved(source, facts)):
            return Build(version, facts, by_code=facts is not own)
    candidates = [(facts, list(_moved(source, facts))) for facts in releases]
    facts, moved = min(candidates, key=lambda c: (any(not m.slugs for m in c[1]), len(c[1])))
    shared = [str(one) for one in moved if not one.slugs]
    if shared:
        raise ReleaseNotKnown(
            f"the code of vLLM {version} is none of a release that kvpatch knows ({RELEASES[0]} to "
            f"{RELEASES[-1]}); of {facts.release}, the nearest, differ {_listed(shared)}",
            "install one of these releases, or a build with the code of one, which kvpatch doctor "
            f"--against says of a wheel; KVPATCH_GENERATION={facts.release} takes this build for "
            "that release where none of this matters to you",
        )
    reasons: dict[str, list[str]] = {}
    for one in moved:
        for slug in one.slugs:
            reasons.setdefault(slug, []).append(str(one))
    moved_of = {slug: _listed(r) for slug, r in reasons.items()}
    return Build(version, facts, facts is not own, moved_of)


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


# --- vLLM's source ------------------------------------------------------------------------

#: The fingerprint of what is not there.
ABSENT = "-"
#: Behind a method's name: the subclasses that define it themselves.
OVERRIDES = "^"
#: Behind a class's name: its bases alone.
BASES = "()"

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:", re.MULTILINE)


class Source:
    """The source of one vLLM.

    Args:
        root: the folder, or the wheel, that holds the package ``vllm``.
    """

    def __init__(self, root: Path | ZipPath) -> None:
        self._root = root
        self._texts: dict[str, str] = {}
        self._parsed: dict[str, list[ast.stmt]] = {}
        self._fingerprints: dict[tuple[str, str, str], str] = {}
        self._classes: dict[str, dict[str, tuple[str, list[str]]]] = {}

    def text(self, module: str) -> str:
        """A module's text; empty where there is none."""
        if module not in self._texts:
            base = module.replace(".", "/")
            found = (self._root.joinpath(f"{base}{end}") for end in (".py", "/__init__.py"))
            path = next((p for p in found if p.is_file()), None)
            self._texts[module] = "" if path is None else path.read_text(encoding="utf-8-sig")
        return self._texts[module]

    def fingerprint(self, module: str, name: str, package: str) -> str:
        """The fingerprint of a function, a method, a class or a constant.

        It leaves out comments, layout, docstrings and the annotations of parameters. A class's
        has its bases and its fields.

        Args:
            name: as in ``Class.method``; with :data:`OVERRIDES` or :data:`BASES` behind it the
                fingerprint is a list of classes.
            package: the modules that may define subclasses.
        """
        key = (module, name, package)
        if key not in self._fingerprints:
            self._fingerprints[key] = self._fingerprint(*key)
        return self._fingerprints[key]

    def _fingerprint(self, module: str, name: str, package: str) -> str:
        if name.endswith(OVERRIDES):
            owner, _, method = name.removesuffix(OVERRIDES).rpartition(".")
            return " ".join(c for _, c in self.overrides(package, owner, method)) or ABSENT
        if name.endswith(BASES):
            found = [b for c, b in _CLASS.findall(self.text(module)) if f"{c}{BASES}" == name]
            return " ".join(found[-1].split()) or "object" if found else ABSENT
        node = self.definition(module, name)
        if node is None:
            return ABSENT
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            return ascii(value.value)
        pieces: list[str] = []
        _describe(node, pieces)
        return hashlib.sha256(" ".join(pieces).encode()).hexdigest()[:12]

    def overrides(self, package: str, owner: str, method: str) -> Iterator[tuple[str, str]]:
        """Yields (module, class) of each subclass of `owner` in `package` that has `method` too."""
        classes, family = self._classes_of(package), {owner}
        while more := {c for c, (_, bases) in classes.items() if family & {*bases}} - family:
            family |= more
        for name in sorted(family - {owner}):
            module = classes[name][0]
            if self.definition(module, f"{name}.{method}") is not None:
                yield module, name

    def definition(self, module: str, name: str) -> ast.stmt | None:
        """The last definition of that name; None where there is none."""
        if module not in self._parsed:
            self._parsed[module] = ast.parse(self.text(module)).body
        return _find(self._parsed[module], name.split("."))

    def _classes_of(self, package: str) -> dict[str, tuple[str, list[str]]]:
        """The classes of a package's modules: where each is, and the names of its bases."""
        if package not in self._classes:
            found = self._classes[package] = {}
            folder = self._root.joinpath(package.replace(".", "/"))
            names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
            for file in sorted(name for name in names if name.endswith(".py")):
                module = f"{package}.{file.removesuffix('.py')}"
                for name, bases in _CLASS.findall(self.text(module)):
                    found[name] = module, re.findall(r"\w+", bases)
        return self._classes[package]


def _find(body: list[ast.stmt], parts: list[str]) -> ast.stmt | None:
    found: ast.stmt | None = None
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.stmt) and n is not node]
            found = _find([n for n in inner if _name_of(n) == parts[0]], parts[:1]) or found
        elif _name_of(node) == parts[0]:
            found = node
    if found is None or len(parts) == 1:
        return found
    return _find(found.body, parts[1:]) if isinstance(found, ast.ClassDef) else None


def _name_of(node: ast.stmt) -> str:
    if isinstance(node, _DEFINITIONS):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return targets[0].id if isinstance(targets[0], ast.Name) else ""


#: What differs between versions of Python, or changes no call.
_LEFT_OUT = {"ctx", "kind", "type_comment", "returns"}


def _describe(node: object, pieces: list[str]) -> None:
    """Writes a definition down, in the same words with each version of Python."""
    if isinstance(node, list):
        for one in node:
            _describe(one, pieces)
        pieces.append("]")
    elif isinstance(node, ast.AST):
        pieces.append(type(node).__name__)
        for field in node._fields:
            value = getattr(node, field, None)
            if value is None or value == [] or field in _LEFT_OUT:
                continue
            if field == "body" and isinstance(node, _DEFINITIONS):
                value = _statements(node)
            elif field == "annotation" and isinstance(node, ast.arg):
                continue
            pieces.append(field)
            _describe(value, pieces)
        pieces.append(")")
    else:
        pieces.append(ascii(node))


def _statements(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.stmt]:
    """Returns a definition's statements without its docstring, and a class's without methods."""
    body = node.body[ast.get_docstring(node, clean=False) is not None :]
    if isinstance(node, ast.ClassDef):
        return [n for n in body if not isinstance(n, _DEFINITIONS)]
    return body
