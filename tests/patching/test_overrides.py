"""A subclass of vLLM's that leaves out what its base does would leave out kvpatch too."""

from __future__ import annotations

import sys
import types

import pytest

from kvpatch.core.errors import SiteDrifted
from kvpatch.core.ledger import Ledger, Site, bypassing, resolve

_MODULE = "vllm.standin"
_SITE = Site(_MODULE, "Base", "finish", "function", ("self", "results"))


@pytest.fixture
def base(monkeypatch):
    """A class that nothing has subclassed yet, where a site names it."""

    class Base:
        __module__ = _MODULE

        def finish(self, results):
            return [*results]

    module = types.ModuleType(_MODULE)
    vars(module)["Base"] = Base
    monkeypatch.setitem(sys.modules, _MODULE, module)
    return Base


def _of_vllms(subclass, base):
    """A class as `subclass` makes it, of vLLM's own modules unless it says otherwise."""
    made = subclass(base)
    if made.__module__ == __name__:
        made.__module__ = _MODULE
    return made


def _calls(base):
    class Calls(base):
        def finish(self, results):
            for one in results:
                if one is None:
                    raise ValueError(one)
            found = super().finish(results)
            return found if found else []

    return Calls


def _inherits(base):
    class Inherits(base):
        pass

    return Inherits


def _is_no_class_of_vllms(base):
    class Elsewhere(base):
        __module__ = "plugin.connector"

        def finish(self, results):
            return results

    return Elsewhere


def _leaves(base):
    """As vLLM #57987 has it: a background thread receives where an option says so."""

    class Leaves(base):
        background_receiver = None

        def finish(self, results):
            if self.background_receiver is not None:
                return self.background_receiver.drain()
            return super().finish(results)

    return Leaves


def _calls_where_there_are_results(base):
    class Sometimes(base):
        def finish(self, results):
            return super().finish(results) if results else []

    return Sometimes


def _calls_another(base):
    class Another(base):
        def finish(self, results):
            super().__init__()
            return results

    return Another


def _is_assigned(base):
    class Assigned(base):
        finish = len

    return Assigned


def _replaces_further_down(base):
    class Further(_calls(base)):
        def finish(self, results):
            return results

    return Further


@pytest.mark.parametrize("subclass", [_calls, _inherits, _is_no_class_of_vllms])
def test_what_always_calls_its_base_is_no_bypass(base, subclass):
    kept = _of_vllms(subclass, base)

    assert bypassing(base, "finish") is None
    assert resolve(_SITE)[0] is base
    assert kept.__base__ is base


@pytest.mark.parametrize(
    "subclass",
    [
        *(_leaves, _calls_where_there_are_results, _calls_another),
        *(_is_assigned, _replaces_further_down),
    ],
)
def test_what_may_not_call_its_base_is_named_and_nothing_is_set(base, subclass):
    before, kind = vars(base)["finish"], _of_vllms(subclass, base)

    with pytest.raises(SiteDrifted) as refused:
        Ledger().apply("slug", {_SITE: lambda wrapped, *_: wrapped()})

    assert f"found {_MODULE}.{kind.__qualname__}.finish, which may not" in str(refused.value)
    assert vars(base)["finish"] is before
