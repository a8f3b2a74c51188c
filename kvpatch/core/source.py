"""Reads definitions out of vLLM's source, without importing it, and takes their fingerprints.

A module is not parsed as a whole: the lines of one definition are cut out by their indentation
and parsed alone, which takes a tenth of the time. Where such a cut ends too early the parser
does not take it, and then the whole module is parsed.
"""

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
#: How definitions begin; a module's constants have neither of the first three.
_OF_CLASSES = ("class {}", "def {}", "async def {}")
_OF_MODULES = (*_OF_CLASSES, "{}:", "{} =")
#: By its margin, where a definition ends: its lines are indented more, or empty, or comments, or
#: close what an earlier one has opened.
_MARGINS = ("", "    ", "        ")
_END = {len(m): re.compile(rf"\n {{0,{len(m)}}}(?=[^\s)\]}}#])") for m in _MARGINS}
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
        """A module's text behind an empty line."""
        if module not in self._texts:
            base = module.replace(".", "/")
            found = (self._root.joinpath(f"{base}{end}") for end in (".py", "/__init__.py"))
            path = next((p for p in found if p.is_file()), None)
            found_text = "" if path is None else path.read_text(encoding="utf-8")
            self._texts[module] = f"\n{found_text}"  # each line has one before it
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
        *owners, last = name.split(".")
        text, margin = self.text(module), ""
        for owner in owners:
            if f"class {owner}" not in text:
                return None
            text, margin = _cut(text, margin, f"class {owner}"), f"{margin}    "
        starts = [start.format(last) for start in (_OF_CLASSES if owners else _OF_MODULES)]
        if text and not any(_places(text, f"\n{m}{s}") for m in _MARGINS for s in starts):
            return None
        cuts = [cut for start in starts if (cut := _cut(text, margin, start))]
        found = _parsed(cuts[0], margin) if len(cuts) == 1 else None
        if found is not None:
            return found
        if module not in self._parsed:
            self._parsed[module] = ast.parse(self.text(module)).body
        return _find(self._parsed[module], [*owners, last])

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


def _cut(text: str, margin: str, start: str) -> str:
    """The lines of the only definition that starts so; empty where there is not one."""
    found = _places(text, f"\n{margin}{start}")
    if len(found) != 1:
        return ""
    first, end = found[0], _END[len(margin)].search(text, found[0] + 1)
    while (line := text.rfind("\n", 0, first)) >= 0 and text.startswith(f"\n{margin}@", line):
        first = line
    if text.startswith(f"\n{margin})", max(line, 0)):
        return ""  # a decorator of several lines
    return text[first : end.start() if end else len(text)]


def _parsed(cut: str, margin: str) -> ast.stmt | None:
    try:
        found = ast.parse(f"if 1:{cut}" if margin else cut).body
    except SyntaxError:
        return None
    return found[0].body[0] if isinstance(found[0], ast.If) else found[0]


def _places(text: str, start: str) -> list[int]:
    """Returns the positions where lines begin with `start`, as a whole word."""
    found, at = [], text.find(start)
    while at >= 0:
        behind = text[at + len(start) : at + len(start) + 1]
        if not (behind.isalnum() or behind == "_"):
            found.append(at)
        at = text.find(start, at + 1)
    return found


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
