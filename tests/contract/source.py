"""Reads classes and methods from a release's source, without importing it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

from kvpatch.core.recognise import Source
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


def code_of(release: str) -> Source:
    """The code of a release, as a build that is not listed is read."""
    return _code(trees.tree(release))


def method(release: str, module: str, qualified_name: str) -> Method | str:
    """The method, or a clause that says what stands in its place."""
    source = code_of(release)
    if not source.text(module):
        return f"no module {module}"
    found = source.definition(module, qualified_name)
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return _method(found)
    owner, _, name = qualified_name.rpartition(".")
    if owner and not isinstance(source.definition(module, owner), ast.ClassDef):
        return f"no class {owner} in {module}"
    for node in _parse(source.text(module)).body if not owner else ():
        if isinstance(node, ast.ImportFrom) and name in [a.name for a in node.names]:
            return method(release, str(node.module), name)
    return f"{owner or module} defines no {name}"


def classes(release: str, module: str) -> list[ast.ClassDef]:
    """The classes of a module, nested ones too; none where there is no such module."""
    found = ast.walk(_parse(text(release, module)))
    return [node for node in found if isinstance(node, ast.ClassDef)]


def text(release: str, module: str) -> str:
    """A module's text, empty where there is no such module."""
    return code_of(release).text(module)


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
    body = function.body[ast.get_docstring(function, clean=False) is not None :]
    return Method(kind, tuple(names), tuple(ast.unparse(ast.Module(body, [])).splitlines()))


_code = cache(Source)
_parse = cache(ast.parse)
