"""Reads classes and methods from a release's source, without importing it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.releases import cache as trees


@dataclass(frozen=True)
class Method:
    """One function as its source has it.

    Attributes:
        kind: as in :class:`kvpatch.core.ledger.Site`.
        parameters: names in order, ``*`` and ``**`` written out.
        lines: of the body, without comments, layout and the docstring.
    """

    kind: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]


def method(release: str, module: str, qualified_name: str) -> Method | str:
    """The method, or a clause that says what stands in its place."""
    path = _path(release, module)
    if path is None:
        return f"no module {module}"
    owner, _, name = qualified_name.rpartition(".")
    body: list[ast.stmt] = _parse(path).body
    for part in owner.split(".") if owner else []:
        found = [n for n in body if isinstance(n, ast.ClassDef) and n.name == part]
        if not found:
            return f"no class {owner} in {module}"
        body = found[-1].body
    functions = [
        n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name
    ]
    imports = (n for n in body if isinstance(n, ast.ImportFrom) and not owner)
    origin = next((n.module for n in imports if name in [a.name for a in n.names]), None)
    if not functions and origin is not None:
        return method(release, origin, name)
    if not functions:
        return f"{owner or module} defines no {name}"
    return _method(functions[-1])


def classes(release: str, module: str) -> list[ast.ClassDef]:
    """The classes of a module, nested ones too; none where there is no such module."""
    path = _path(release, module)
    found = () if path is None else ast.walk(_parse(path))
    return [node for node in found if isinstance(node, ast.ClassDef)]


def text(release: str, module: str) -> str:
    """A module's text, empty where there is no such module."""
    path = _path(release, module)
    return "" if path is None else path.read_text(encoding="utf-8")


def _method(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Method:
    decorators = {ast.unparse(d) for d in function.decorator_list}
    kind = next((d for d in ("classmethod", "staticmethod") if d in decorators), "function")
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    names += [a.arg for a in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    text = ast.unparse(ast.Module(body, []))
    return Method(kind, tuple(names), tuple(text.splitlines()))


def _path(release: str, module: str) -> Path | None:
    base = trees.tree(release).joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
