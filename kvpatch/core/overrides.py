"""Methods of subclasses that would leave out a wrapper of their base's method."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from kvpatch.core import kvcacheds_patch

#: What is inside these may not be evaluated, or later.
_CONDITIONAL = (
    *(ast.If, ast.For, ast.While, ast.Match, ast.IfExp, ast.BoolOp, ast.ExceptHandler),
    *(ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ListComp, ast.GeneratorExp),
)


def bypassing(owner: type, name: str) -> type | None:
    """The first of vLLM's subclasses whose own method does not always call its base's.

    Subclasses of others are not constructed by vLLM, and kvcached's own patch is superseded.
    """
    for kind in _subclasses(owner):
        method = vars(kind).get(name)
        if method is None or kvcacheds_patch.is_theirs(name, method):
            continue
        if kind.__module__.startswith("vllm.") and not _always_calls_base(method, name):
            return kind
    return None


def _subclasses(owner: type) -> Iterator[type]:
    kind: type
    for kind in owner.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _always_calls_base(method: Any, name: str) -> bool:
    """True if each call of it comes to ``super().name(...)``, but for one that raises."""
    function: Callable[..., Any] = inspect.unwrap(getattr(method, "__func__", method))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False  # nobody can say
    for statement in getattr(tree.body[0], "body", ()):
        if any(_is_base(node, name) for node in _evaluated(statement)):
            return True
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            return False
    return False


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in a statement that is evaluated whenever it is reached."""
    if isinstance(node, _CONDITIONAL):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _evaluated(child)


def _is_base(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    )
