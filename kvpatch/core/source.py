"""Reads definitions out of vLLM's source, without importing it, and takes their fingerprints."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import Path as ZipPath

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
            self._texts[module] = "" if path is None else path.read_text(encoding="utf-8")
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
