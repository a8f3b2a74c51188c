"""Patches that cannot half-apply: the only ``setattr`` on vLLM.

A patch names its sites; all of them are found and checked before the first is
set, and every change is written to a ledger that undoes it exactly. Checks
compare what is there with what the patch was written for (module, defining
class, kind of descriptor, parameters): a copy that goes to the wrong place is
a wrong answer, so anything else than what we know is refused.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import CellType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

import wrapt

from kvpatch.core import kvcacheds_patch
from kvpatch.core.errors import SiteDrifted
from kvpatch.core.releases import ReleaseFacts

#: Called in place of a method, as ``wrapper(wrapped, instance, ...)`` with the method's arguments,
#: so that it names those that it needs.
Wrapper = Callable[..., Any]
#: The method of vLLM's, bound to its object, as a wrapper is given it.
Wrapped = Callable[..., Any]
#: A function, called with the object that it is a method of.
Method = Callable[..., Any]


@dataclass(eq=False)
class Parts:
    """Patches' parts in a call that they share, in the order in which the patches were applied.

    Both are replaced as a whole: a call that is under way has those with which it began.

    Attributes:
        by_slug: by the slugs of their patches.
        on: the same without them.
    """

    by_slug: Mapping[str, Any] = field(default_factory=dict)
    on: tuple[Any, ...] = ()

    def put(self, slug: str, part: Any) -> None:
        self.by_slug = {**self.by_slug, slug: part}
        self.on = tuple(self.by_slug.values())

    def clear(self) -> None:
        self.by_slug, self.on = {}, ()


@dataclass(frozen=True)
class Step:
    """A patch's part in a call that several share, or that is made in every step of the engine.

    A plain function takes the place of the method, once for all patches: what wrapt makes takes
    ten times as long.

    Attributes:
        replace: of the method, and of the parts that are on, makes that function, which calls the
            method and does nothing else where no part is: it may have to be left behind.
        part: the patch's, as the function takes it.
    """

    replace: Callable[[Method, Parts], Method]
    part: Any = None


Kind = Literal["function", "classmethod", "staticmethod"]

_MISSING: Any = object()


@dataclass(frozen=True)
class Site:
    """A method that a patch wraps, on the class that defines it; or a module's function.

    Attributes:
        module: the module that defines the class, or that calls the function by its own name.
        owner: the class's name; empty for a function.
        name: the method's name.
        kind: what stands in the class's own dictionary.
        parameters: names in order, ``self`` or ``cls`` included. Annotations and
            defaults are not compared: they change without changing a call.
        is_front_end: whether it is the API server's, which need not import the connector: it
            is wrapped when its own module is imported.
    """

    module: str
    owner: str
    name: str
    kind: Kind
    parameters: tuple[str, ...]
    is_front_end: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name_in_module}"

    @property
    def name_in_module(self) -> str:
        """Returns the site's name with that of its class, if it has one."""
        return f"{self.owner}.{self.name}" if self.owner else self.name


class Switch(NamedTuple):
    """A variable, and how it is read."""

    variable: str
    read: Callable[[], str]


@dataclass(frozen=True)
class Patch:
    """A patch: it solves one problem.

    Attributes:
        slug: its name in ``KVPATCH_DISABLE``, logs and docs.
        wire_affecting: whether a peer sees the difference at the handshake.
        sites: what it wraps in a release, and with what; nothing where it is not needed.
        document: the patch module's docstring, from which PATCHES.md is made.
        not_needed: why some releases do without it.
        switch: what says ``off`` where nothing of it is wanted, nor any time of a step; None where
            it is always wanted.
    """

    slug: str
    wire_affecting: bool
    sites: Callable[[ReleaseFacts], Mapping[Site, Wrapper | Step]]
    document: str
    not_needed: str = ""
    switch: Switch | None = None


@dataclass(eq=False)
class _Change:
    """A wrapper that was set.

    Attributes:
        parts: the parts that are on, in a function that patches share; None for a wrapper.
        enabled: non-empty while a wrapper is on; empty in one that could not be taken out. It is a
            list because wrapt tests a list, at every call, ten times faster than it calls a
            function.
    """

    slug: str
    owner: type | ModuleType
    name: str
    before: Any
    site: Site | None
    ours: Any = None
    parts: Parts | None = None
    enabled: list[str] = field(default_factory=lambda: ["on"])

    def __str__(self) -> str:
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}.{self.name}"
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"

    def turn_on(self) -> None:
        self.enabled[:] = ["on"]

    def turn_off(self) -> None:
        self.enabled.clear()
        if self.parts is not None:
            self.parts.clear()


@dataclass
class Ledger:
    """The wrappers that are set, so that they can be undone and are never set twice."""

    _changes: list[_Change] = field(default_factory=list)

    def apply(
        self, slug: str, sites: Mapping[Site, Wrapper | Step], *, supersede: bool = False
    ) -> list[str]:
        """Wraps all of `sites`, or none; what it has wrapped before is not wrapped again.

        Where a site takes a :class:`Step`, the patches that have one there share a function.

        Args:
            supersede: whether what kvcached's own patch has replaced is wrapped in place of
                its replacement, which :meth:`undo` puts back.

        Returns the places where that was so.

        Raises:
            SiteDrifted: a site is not what the patch was written for. Nothing is set.
        """
        # One that undo() had to leave in place is checked no more: what stands
        # there now is somebody else's wrapper, with ours below it.
        left = {change.site for change in (*self._of(slug), *self._shared_by(sites))}
        new = [
            (*resolve(s, supersede=supersede), s, wrapper)
            for s, wrapper in sites.items()
            if s not in left
        ]
        for change in self._of(slug):
            change.turn_on()
        behind = [str(s) for owner, target, s, _ in new if vars(owner)[s.name] is not target]
        for owner, target, site, wrapper in new:
            self._wrap(slug, owner, site.name, target, wrapper, site)
        for change, (parts, step) in self._shared_by(sites).items():
            change.turn_on()
            parts.put(slug, step.part)
        return behind

    def wrap(self, slug: str, owner: type | ModuleType, name: str, wrapper: Wrapper) -> None:
        """Wraps a module's function or a class's method once, by its name alone.

        A tripwire is one on ``__init__``, which a class may inherit.
        """
        standing = [c for c in self._of(slug) if (c.owner, c.name) == (owner, name)]
        for change in standing:
            change.turn_on()
        if not standing:
            target = vars(owner).get(name) or getattr(owner, name)
            self._wrap(slug, owner, name, target, wrapper)

    def supersede(self, slug: str) -> list[str]:
        """Puts aside what kvcached's own patch has put over or before our wrappers.

        Returns the places; :meth:`undo` puts back what was there.
        """
        places = {
            (c.owner, c.name): c
            for c in self._changes
            if c.enabled and c.site is not None and isinstance(c.owner, type)
        }
        found = []
        for (owner, name), change in places.items():
            if kvcacheds_patch.is_theirs(name, vars(owner).get(name)):
                self._replace(slug, owner, name, change.ours)
                found.append(f"{owner.__qualname__}.{name}")
            for kind in tuple(kvcacheds_patch.shadows(owner, name)):
                self._replace(slug, kind, name, _MISSING)
                found.append(f"{kind.__qualname__}.{name}")
        return found

    def _replace(self, slug: str, owner: type, name: str, ours: Any) -> None:
        self._changes.append(_Change(slug, owner, name, vars(owner)[name], None, ours))
        _put(owner, name, ours)

    def undo(self) -> list[str]:
        """Restores what was there before, last change first.

        Returns the places that it left alone because somebody else has wrapped
        them since. Our wrapper stays below theirs there, and does nothing.
        """
        left: list[_Change] = []
        for change in reversed(self._changes):
            change.turn_off()
            if vars(change.owner).get(change.name, _MISSING) is not change.ours:
                left.append(change)
            else:
                _put(change.owner, change.name, change.before)
        self._changes = left[::-1]
        return [str(change) for change in self._changes[::-1]]

    def _shared_by(self, sites: Mapping[Site, Wrapper | Step]) -> dict[_Change, tuple[Parts, Step]]:
        """The shared functions that stand where these sites have a part: what is on, the part."""
        taken = {site: step for site, step in sites.items() if isinstance(step, Step)}
        return {
            change: (change.parts, taken[change.site])
            for change in self._changes
            if change.parts is not None and change.site in taken
        }

    def _of(self, slug: str) -> list[_Change]:
        return [change for change in self._changes if change.slug == slug]

    def _wrap(
        self,
        slug: str,
        owner: type | ModuleType,
        name: str,
        target: Any,
        wrapper: Wrapper | Step,
        site: Site | None = None,
    ) -> None:
        change = _Change(slug, owner, name, vars(owner).get(name, _MISSING), site)
        enabled: Any = change.enabled
        if isinstance(wrapper, Step):
            change.parts = Parts()
            change.ours = wrapper.replace(_as_function(target), change.parts)
        elif kind_of(target) == "staticmethod":
            # Else what an instance looks up holds that instance: the thread that a worker
            # starts on its static listener would keep the worker for ever.
            function = wrapt.FunctionWrapper(target.__func__, _bound(wrapper), enabled=enabled)
            change.ours = staticmethod(function)
        else:
            change.ours = wrapt.FunctionWrapper(target, _bound(wrapper), enabled=enabled)
        setattr(owner, name, change.ours)
        self._changes.append(change)


def _put(owner: type | ModuleType, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _bound(wrapper: Wrapper) -> Callable[..., Any]:
    """Returns the wrapper as wrapt calls it."""

    def call(wrapped: Wrapped, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapper(wrapped, instance, *args, **kwargs)

    return call


def _as_function(target: Any) -> Method:
    """Returns a function that takes the object first; other plugins' wrappers bind themselves."""
    if type(target) is FunctionType:  # as a wrapper says of itself that it is
        return target

    @wraps(target)
    def bound(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return target.__get__(instance, type(instance))(*args, **kwargs)

    return bound


def resolve(site: Site, *, supersede: bool = False) -> tuple[type | ModuleType, Any]:
    """The class that defines `site`, or the module, and what to wrap there, checked.

    Args:
        supersede: whether to look behind kvcached's own replacement.

    Raises:
        SiteDrifted: the module, the class, the method or its shape is another, or a subclass of
            vLLM's may not call it.
    """
    try:
        module = importlib.import_module(site.module)
    except ModuleNotFoundError as error:
        raise SiteDrifted(str(site), f"a module {site.module}", f"none ({error})") from error
    owner = vars(module).get(site.owner) if site.owner else module
    if not isinstance(owner, type | ModuleType):
        raise SiteDrifted(str(site), f"a class {site.owner} in {site.module}", repr(owner))
    attribute = vars(owner).get(site.name, _MISSING)
    if attribute is _MISSING:
        raise SiteDrifted(str(site), *_not_found(owner, site))
    if supersede and isinstance(owner, type):
        attribute = kvcacheds_patch.original_of(owner, site.name) or attribute
    kind = kind_of(attribute)
    if kind != site.kind:
        raise SiteDrifted(str(site), f"a {site.kind}", f"a {kind}")
    parameters = parameters_of(attribute)
    if parameters != site.parameters and not _calls_on(attribute, owner, site):
        whose = getattr(getattr(attribute, "__func__", attribute), "__module__", None)
        raise SiteDrifted(
            str(site),
            f"parameters ({', '.join(site.parameters)})",
            f"({', '.join(parameters)}), defined in {whose}",
        )
    past = bypassing(owner, site.name) if isinstance(owner, type) else None
    if past is not None:
        raise SiteDrifted(
            str(site),
            "subclasses to call it",
            f"{past.__module__}.{past.__qualname__}.{site.name}, which may not",
        )
    return owner, attribute


def _not_found(owner: type | ModuleType, site: Site) -> tuple[str, str]:
    """Describes a missing method or function: what was expected, and what was found."""
    if isinstance(owner, ModuleType):
        return f"a function {site.name} in {site.module}", "none"
    holder = next((c for c in owner.__mro__ if site.name in vars(c)), None)
    found = "no such method" if holder is None else f"one inherited from {holder.__qualname__}"
    return f"a method that {site.owner} itself defines", found


def _calls_on(attribute: Any, owner: type | ModuleType, site: Site) -> bool:
    """True if another plugin's wrapper was made of the release's method, and of one alone.

    kvcached's own replacements may keep it too, and are no wrappers.
    """
    if isinstance(owner, ModuleType):
        return False
    own = owner.__module__, f"{owner.__qualname__}.{site.name}", site.parameters
    below = _functions_below(attribute, {}).values()
    found = [(f.__module__, f.__qualname__, parameters_of(f)) for f in below]
    return found.count(own) == 1 and not kvcacheds_patch.is_theirs(site.name, attribute)


def _functions_below(wrapper: Any, found: dict[int, Any]) -> dict[int, Any]:
    """Adds what a wrapper has in closures or as ``__wrapped__``, at any depth, to `found` by id."""
    one = getattr(wrapper, "__func__", wrapper)
    if not isinstance(one, FunctionType) or id(one) in found:
        return found
    if type(one) is FunctionType:  # and no wrapt's wrapper, which says that it is one
        found[id(one)] = one
        for cell in one.__closure__ or ():
            if cell != CellType():  # an empty one
                _functions_below(cell.cell_contents, found)
    return _functions_below(getattr(one, "__wrapped__", None), found)


def kind_of(attribute: object) -> str:
    """Returns the kind of an entry of a class's own dictionary, by the names of :data:`Kind`."""
    if isinstance(attribute, classmethod):
        return "classmethod"
    if isinstance(attribute, staticmethod):
        return "staticmethod"
    return "function" if inspect.isroutine(attribute) else type(attribute).__name__


def parameters_of(attribute: Any) -> tuple[str, ...]:
    """Parameter names of a raw class attribute, ``*`` and ``**`` written out."""
    function = getattr(attribute, "__func__", attribute)
    marks: dict[object, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    found = inspect.signature(function).parameters.values()
    return tuple(marks.get(p.kind, "") + p.name for p in found)


# --- methods of subclasses that would leave out a wrapper of their base's method ---------------

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
