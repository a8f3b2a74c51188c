"""What a tree of Python says in its strings: templates, with … for what is filled in."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import kvpatch.core.errors
from kvpatch.core.errors import Mistake

from .tables import ROOT

GAP = "…"
#: A cure that is put together at run time.
IN_THE_LINE = "do what the line ends with"
_ERROR = "KvpatchError"
_FORMAT = re.compile(r"%(?:\.\d+)?[sdrf]")
#: Commands that a person runs; what they say is no engine's.
_TOOLS = ("verify", "cli.py")


@dataclass(frozen=True)
class Refusal:
    """A sentence that refuses something.

    Attributes:
        error: the class that is raised with it.
        cure: what its raise says to change; empty where it says nothing.
    """

    error: str
    text: str
    cure: str = ""


@cache
def modules() -> dict[str, ast.Module]:
    """kvpatch's own modules, by their paths in the checkout."""
    paths = sorted((ROOT / "kvpatch").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


@cache
def trees() -> tuple[ast.Module, ...]:
    """kvpatch's own modules, but for the tools."""
    return tuple(tree for path, tree in modules().items() if not set(_TOOLS) & set(path.split("/")))


def templates(found: Iterable[ast.Module]) -> Iterator[str]:
    """Every string that is no docstring, and each way in which a conditional one comes out."""
    for tree in found:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                yield from _texts(node)


def refusals() -> list[Refusal]:
    """Every sentence that kvpatch raises one of its errors with, each once."""
    errors = _errors()
    makers = _makers(errors)
    found = [
        Refusal(error, text, cure)
        for tree in trees()
        for error, arguments in _raised(tree, makers)
        if error in errors
        for text, cure in _reasons_and_cures(arguments, error in cures())
    ]
    return list(dict.fromkeys(found))


@cache
def cures() -> dict[str, str]:
    """The errors that are made of a reason and a cure, with the default of the cure or nothing."""
    found: dict[str, str] = {}
    for name in _errors():
        error = getattr(kvpatch.core.errors, name, None)
        if error is not None and issubclass(error, Mistake):
            parameter = inspect.signature(error).parameters.get("cure")
            is_given = parameter is None or parameter.default is parameter.empty
            found[name] = "" if is_given else parameter.default
    return found


def _raised(tree: ast.Module, makers: dict[str, str]) -> Iterator[tuple[str, list[ast.expr]]]:
    """(class, arguments) of every error that is made, raised at once or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                    yield node.name, list(call.args)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            name = makers.get(name, name.rpartition(".")[2])
            yield name, [*node.args, *(word.value for word in node.keywords)]


def _sentences(arguments: Sequence[ast.expr]) -> Iterator[str]:
    for argument in arguments:
        for text in _texts(argument):
            if " " in text.replace(GAP, "").strip():
                yield text


@cache
def _constants() -> dict[str, str]:
    """Names that stand for one string wherever they are assigned."""
    values: dict[str, set[str | None]] = {}
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
                text = node.value.value if is_text else None
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        values.setdefault(target.id, set()).add(text)
    return {
        name: text
        for name, (text, *others) in values.items()
        if text is not None and not others and " " in text
    }


def _errors() -> set[str]:
    """kvpatch's errors by name: the classes below one, wherever they are."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {_ERROR}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def _makers(errors: Collection[str]) -> dict[str, str]:
    """Functions that make an error: their names, and what they return."""
    return {
        node.name: ast.unparse(node.returns)
        for tree in trees()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.returns is not None
        if ast.unparse(node.returns) in errors
    }


def _reasons_and_cures(arguments: Sequence[ast.expr], has_cure: bool) -> Iterator[tuple[str, str]]:
    """(reason, cure) of each way in which an error comes out; an empty cure where it has none."""
    if has_cure and len(arguments) == 2:
        for cure in list(_sentences(arguments[1:])) or [IN_THE_LINE]:
            yield from ((reason, cure) for reason in _sentences(arguments[:1]))
    else:
        yield from ((reason, "") for reason in _sentences(arguments))


def _texts(node: ast.AST | None) -> list[str]:
    """What a string comes out as; nothing where a node is none."""
    if isinstance(node, ast.Constant):
        return [_FORMAT.sub(GAP, node.value)] if isinstance(node.value, str) else []
    if isinstance(node, ast.Name) and node.id in _constants():
        return [_constants()[node.id]]
    if isinstance(node, ast.FormattedValue):
        return _texts(node.value) if isinstance(node.value, ast.Name) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join((_texts(part) or [GAP])[0] for part in node.values)]
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _texts(node.left) or [GAP], _texts(node.right) or [GAP]
        return [a + b for a in left for b in right if a + b != 2 * GAP]
    return []
