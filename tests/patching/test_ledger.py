"""All or nothing, exact undo, and nobody else's wrapper taken out."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import types
import weakref
from functools import wraps

import pytest
import wrapt

from kvpatch.core.errors import SiteDrifted
from kvpatch.core.ledger import Ledger, Site, Step

MODULE = "kvpatch_ledger_target"


class Base:
    def inherited(self, value):
        return value


class Target(Base):
    def method(self, value):
        return value

    @classmethod
    def answer(cls, value):
        return cls, value

    @staticmethod
    def plain(value):
        return value

    def several(self, one, two=2, *more, three=3, **named):
        return one, two, more, three, named

    async def later(self, value):
        return value

    attribute = 1


class Child(Target):
    pass


@pytest.fixture(autouse=True)
def _module():
    module = types.ModuleType(MODULE)
    module.Target, module.Base = Target, Base
    sys.modules[MODULE] = module
    before = dict(vars(Target))
    yield
    del sys.modules[MODULE]
    after = dict(vars(Target))
    for name in after.keys() - before.keys():
        delattr(Target, name)
    for name, value in before.items():
        if name not in ("__dict__", "__weakref__") and after.get(name) is not value:
            setattr(Target, name, value)


def _site(name="method", kind="function", parameters=("self", "value"), owner="Target"):
    return Site(MODULE, owner, name, kind, parameters)


METHOD = _site()
CLASSMETHOD = _site("answer", "classmethod", ("cls", "value"))
STATICMETHOD = _site("plain", "staticmethod", ("value",))


def _plus_one(wrapped, instance, *args, **kwargs):
    found = wrapped(*args, **kwargs)
    return (found[0], found[1] + 1) if isinstance(found, tuple) else found + 1


ALL = {METHOD: _plus_one, CLASSMETHOD: _plus_one, STATICMETHOD: _plus_one}


def test_wraps_every_kind_of_method_and_keeps_the_class_of_a_subclass():
    Ledger().apply("p", ALL)

    assert Target().method(1) == 2
    assert Child.answer(1) == (Child, 2)
    assert Target.plain(1) == 2


_SEVERAL = _site("several", parameters=("self", "one", "two", "*more", "three", "**named"))


@pytest.mark.parametrize(
    "call",
    [
        lambda target: target.several(1),
        lambda target: target.several(1, 5),
        lambda target: target.several(1, three=4),
        lambda target: target.several(two=5, one=1),
        lambda target: target.several(1, 5, 6, 7, three=4, four=8),
        lambda target: Target.several(target, 1, 5),
    ],
)
@pytest.mark.parametrize("names_one", [False, True])
def test_arguments_arrive_as_they_were_given(call, names_one):
    """Whichever of them a wrapper names; what is not passed is not made up."""
    expected, given = call(Target()), []

    def none(wrapped, instance, *args, **kwargs):
        given.append(instance)
        return wrapped(*args, **kwargs)

    def first(wrapped, instance, one, *more, **named):
        given.append(one)
        return wrapped(one, *more, **named)

    Ledger().apply("p", {_SEVERAL: first if names_one else none})

    assert call(Target()) == expected
    assert len(given) == 1


def test_a_call_that_does_not_fit_a_wrapper_is_the_callers_error():
    Ledger().apply("p", {METHOD: lambda wrapped, instance, value: wrapped(value)})

    assert Target().method(value=1) == 1
    for wrong in (lambda: Target().method(), lambda: Target().method(1, 2)):
        with pytest.raises(TypeError):
            wrong()


def test_a_coroutine_function_stays_one():
    async def later(wrapped, instance, value):
        return await wrapped(value) + 1

    Ledger().apply("p", {_site("later"): later})

    assert inspect.iscoroutinefunction(Target.later)
    assert asyncio.run(Target().later(value=1)) == 2


@pytest.mark.parametrize(
    ("drifted", "found"),
    [
        (_site("gone"), "no such method"),
        (_site("inherited"), "inherited from Base"),
        (_site("answer"), "a classmethod"),
        (_site("attribute"), "a int"),
        (_site(parameters=("self", "another")), r"\(self, value\)"),
        (_site(owner="Nobody"), "None"),
        (Site("no.such.module", "Target", "method", "function", ("self", "value")), "none"),
    ],
)
def test_one_drifted_site_and_nothing_is_set(drifted, found):
    before = dict(vars(Target))

    with pytest.raises(SiteDrifted, match=found):
        Ledger().apply("p", {METHOD: _plus_one, drifted: _plus_one, CLASSMETHOD: _plus_one})

    assert dict(vars(Target)) == before


def test_undo_leaves_a_foreign_wrapper_and_ours_below_it_does_nothing():
    ledger = Ledger()
    ledger.apply("p", ALL)
    foreign = wrapt.FunctionWrapper(
        vars(Target)["method"], lambda wrapped, instance, args, kwargs: wrapped(*args) * 10
    )
    Target.method = foreign

    assert ledger.undo() == [f"{__name__}.Target.method"]

    assert vars(Target)["method"] is foreign
    assert Target().method(1) == 10, "theirs still works, ours is out of the way"
    assert Target.plain(1) == 1, "the rest was undone"

    ledger.apply("p", ALL)
    assert Target().method(1) == 20, "applying again switches ours on, below theirs"
    assert Target.plain(1) == 2


def test_a_guard_is_undone_even_where_construction_was_inherited():
    def refuse(wrapped, instance, *args, **kwargs):
        raise RuntimeError("refused")

    ledger = Ledger()
    ledger.wrap("tripwire", Target, "__init__", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        Child()

    ledger.undo()

    Child()
    assert "__init__" not in vars(Target)


def test_what_an_instance_looks_up_of_a_static_method_does_not_hold_it():
    """<= 0.11.0 a worker starts a thread on its static listener, and must not live as long."""
    ledger = Ledger()
    ledger.apply("p", {STATICMETHOD: _plus_one})
    instance = Target()
    gone, found = weakref.ref(instance), instance.plain
    del instance
    gc.collect()
    assert gone() is None
    assert found(1) == 2


def _steps(method, parts):
    @wraps(method)
    def shared(self, *args, **kwargs):
        found = method(self, *args, **kwargs)
        return (sorted(parts.by_slug), found) if parts.on else found

    return shared


_STEP = {METHOD: Step(_steps)}


def test_steps_of_several_patches_share_a_wrapper():
    original = vars(Target)["method"]
    ledger = Ledger()
    ledger.apply("p", _STEP)
    ledger.apply("q", {**_STEP, CLASSMETHOD: _plus_one})
    ledger.apply("p", _STEP)
    assert Target().method(1) == (["p", "q"], 1)
    assert vars(Target)["method"].__wrapped__ is original

    assert ledger.undo() == []
    assert vars(Target)["method"] is original
    ledger.apply("q", _STEP)
    assert Target().method(1) == (["q"], 1)


def test_a_shared_function_goes_over_a_wrapper():
    seen = []

    def note(wrapped, instance, *args, **kwargs):
        seen.append(instance)
        return "under", wrapped(*args, **kwargs)

    ledger, target = Ledger(), Target()
    ledger.apply("q", {METHOD: note})
    ledger.apply("p", _STEP)

    assert target.method(1) == (["p"], ("under", 1))
    assert seen == [target]
    ledger.undo()
    assert target.method(1) == 1


def test_a_shared_function_is_what_it_stands_for():
    """For whoever pickles it, reads its parameters, or asks for its name."""
    original = vars(Target)["method"]
    ledger = Ledger()
    ledger.apply("p", _STEP)
    shared = vars(Target)["method"]

    assert inspect.isfunction(shared)
    assert inspect.signature(shared) == inspect.signature(original)
    assert (shared.__qualname__, shared.__doc__) == (original.__qualname__, original.__doc__)
    ledger.undo()


def test_a_patch_that_drifted_elsewhere_has_no_step():
    ledger = Ledger()
    ledger.apply("p", _STEP)
    with pytest.raises(SiteDrifted):
        ledger.apply("q", {**_STEP, _site("gone"): _plus_one})

    assert Target().method(1) == (["p"], 1)


def test_a_shared_function_that_was_left_behind_is_on_for_whoever_comes_next():
    ledger = Ledger()
    ledger.apply("p", _STEP)
    Target.method = wrapt.FunctionWrapper(
        vars(Target)["method"], lambda wrapped, instance, args, kwargs: wrapped(*args)
    )
    assert ledger.undo()
    assert not any(change.enabled for change in ledger._changes)

    ledger.apply("q", _STEP)

    assert Target().method(1) == (["q"], 1)
    assert all(change.enabled for change in ledger._changes), "what kvcached does over it counts"


# --- another plugin's wrapper, which was there first --------------------------------


def _bare(method):
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


def _bare_with_self(method):
    def wrapper(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    return wrapper


def _of_other_parameters(method):
    def wrapper(self, value, *args, more=None):
        return method(self, value)

    return wrapper


def _named(method):
    @wraps(method)
    def wrapper(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    return wrapper


def _of_bound(method):
    bound = method.__get__(Target)

    @wraps(bound)
    def wrapper(cls, *args, **kwargs):
        return bound(*args, **kwargs)

    return classmethod(wrapper)


FOREIGN = {
    "bare": (METHOD, _bare),
    "bare with self": (METHOD, _bare_with_self),
    "named": (METHOD, _named),
    "other parameters": (METHOD, _of_other_parameters),
    "two": (METHOD, lambda method: _bare(_bare_with_self(method))),
    "named over bare": (METHOD, lambda method: _named(_bare(method))),
    "by wrapt": (METHOD, lambda m: wrapt.FunctionWrapper(_bare(m), lambda w, i, a, k: w(*a, **k))),
    "over wrapt": (
        METHOD,
        lambda m: _bare(wrapt.FunctionWrapper(m, lambda w, i, a, k: w(*a, **k))),
    ),
    "classmethod": (CLASSMETHOD, lambda method: classmethod(_bare(method.__func__))),
    "classmethod, bound": (CLASSMETHOD, _of_bound),
    "staticmethod": (STATICMETHOD, lambda method: staticmethod(_bare(method.__func__))),
}


@pytest.mark.parametrize(("site", "wrap"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_wrapper_that_calls_on_is_no_drift(site, wrap):
    foreign = wrap(vars(Target)[site.name])
    setattr(Target, site.name, foreign)
    ledger = Ledger()
    ledger.apply("p", {site: _plus_one})
    ledger.apply("q", {site: _plus_one})

    found = getattr(Target(), site.name)(1)

    assert (found[1] if isinstance(found, tuple) else found) == 3
    assert ledger.undo() == []
    assert vars(Target)[site.name] is foreign


def _replacement(method):
    return lambda self, *args, **kwargs: 7


def _of_a_dictionary(method):
    kept = {"method": method}
    return lambda *args, **kwargs: kept["method"](*args, **kwargs)


def _of_two(method):
    other = types.FunctionType(method.__code__, {}, "method")
    other.__qualname__, other.__module__ = method.__qualname__, method.__module__
    return lambda *args, **kwargs: (method or other)(*args, **kwargs)


@pytest.mark.parametrize("wrap", [_replacement, _of_a_dictionary, _of_two, lambda m: _bare(len)])
def test_what_may_not_call_on_is_drift_and_names_whose_it_is(wrap):
    foreign = wrap(vars(Target)["method"])
    Target.method = foreign

    with pytest.raises(SiteDrifted, match=f"expected parameters.*defined in {__name__}"):
        Ledger().apply("p", {METHOD: _plus_one})

    assert vars(Target)["method"] is foreign


def test_a_modules_function_is_wrapped_where_it_is_called_from(monkeypatch):
    module = sys.modules[__name__]
    site = Site(__name__, "", "_called", "function", ("a", "b"))
    ledger = Ledger()
    ledger.apply("p", {site: _plus_one})
    assert module._called(1, b=2) == 4
    assert ledger.undo() == []
    assert module._called(1, b=2) == 3

    for name, parameters, found in (
        ("_nothing", ("a", "b"), "expected a function _nothing in .*found none"),
        ("_called", ("a",), r"expected parameters \(a\), found \(a, b\)"),
    ):
        with pytest.raises(SiteDrifted, match=found):
            Ledger().apply("p", {Site(__name__, "", name, "function", parameters): _plus_one})


def _called(a, b):
    return a + b
