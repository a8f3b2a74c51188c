"""Stand-ins for objects of vLLM's and NIXL's: their base, the same with every wrapt, and a swap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import wrapt

if TYPE_CHECKING:
    ObjectProxy: TypeAlias = wrapt.ObjectProxy[Any]
else:
    # wrapt < 2.2 has a class that is not generic, and other packages pin wrapt < 2.
    ObjectProxy = wrapt.ObjectProxy


class AgentProxy(ObjectProxy):
    """A NIXL agent behind another object, which the release takes for the agent.

    Each step asks it of each transfer. wrapt looks for an attribute in its own way first, as which
    it calls Python's; without that it takes a third of the time.
    """

    __getattribute__ = object.__getattribute__


class _Lookalike:
    def __del__(self) -> None:
        """Does nothing: the attributes are the owner's to let go of."""


def lookalike(owner: Any, **values: Any) -> Any:
    """Returns another object of an owner's class, with the owner's attributes but for these.

    All others are shared, those that a method sets included. A method that is called with it, and
    those that this one calls, find these values; other threads find the owner's own.
    """
    kind = type(owner)
    members: dict[str, Any] = {name: _constant(value) for name, value in values.items()}
    other: Any = object.__new__(type(kind.__name__, (_Lookalike, kind), members))
    other.__dict__ = vars(owner)
    return other


def _constant(value: Any) -> property:
    return property(lambda _: value)


def bound_to(owner: Any, method: Any) -> Any:
    """Returns another object's method, bound to this one: a function's, or a wrapper of wrapt's."""
    found = getattr(method, "_self_parent", None)  # of a wrapper; its ``__func__`` would be inside
    if found is None:
        found = getattr(method, "__func__", None)
    if found is None:  # as wrapt hands on what was called by its class
        found = method.__wrapped__
    return found.__get__(owner, type(owner))


_MISSING: Any = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Gives these attributes of an object other values, while inside."""
    held = vars(owner)
    before = {name: held.get(name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
