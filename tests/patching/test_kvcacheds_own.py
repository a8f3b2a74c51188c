"""kvcached's own patch is put aside exactly, in either order, and put back by undo.

STAND-IN: a module that replaces methods as kvcached's does. The real one, on real
releases, is played by tests/lab/test_kvcached.py.
"""

from __future__ import annotations

import sys
import types

import pytest
from packaging.version import Version

from kvpatch.core import kvcacheds_patch
from kvpatch.core.errors import SiteDrifted
from kvpatch.core.ledger import Ledger, Site
from kvpatch.core.releases import FACTS
from kvpatch.patches.kvcached_layout import PATCH

MODULE = "kvpatch_connector_of_the_test"
_STANDIN = """
class NixlConnectorPatch:
    def patch_connector(self, connector, worker, keep=True):
        @classmethod
        def _kvcached_layout(cls, *args, **kwargs):
            return "kvcached's"

        if not hasattr(connector, "_original_get_layout"):
            connector._original_get_layout = connector.get_required_kvcache_layout
        connector.get_required_kvcache_layout = _kvcached_layout
        if keep and not hasattr(worker, "_kvcached_original_register_kv_caches"):
            worker._kvcached_original_register_kv_caches = worker.register_kv_caches

        def _patched_register(self, kv_caches, *args, **kwargs):
            return "kvcached's"

        if not getattr(worker, "_kvcached_register_patched", False):
            worker.register_kv_caches = _patched_register
            worker._kvcached_register_patched = True
"""
REGISTER = Site(MODULE, "Worker", "register_kv_caches", "function", ("self", "kv_caches"))
LAYOUT = Site(MODULE, "Base", "get_required_kvcache_layout", "classmethod", ("cls", "vllm_config"))


class World:
    """A connector whose layout hook is a base's or its own, its worker, and kvcached."""

    def __init__(self, *, own_hook: bool) -> None:
        class Base:
            @classmethod
            def get_required_kvcache_layout(cls, vllm_config):
                return "vLLM's"

        class Pull(Base):
            pass

        class Worker:
            def register_kv_caches(self, kv_caches):
                return "vLLM's"

        self.base, self.worker = Base, Worker
        self.connector = Base if own_hook else Pull
        self.classes = (Base, Pull, Worker)
        module = types.ModuleType(MODULE)
        module.Base, module.Worker = Base, Worker
        sys.modules[MODULE] = module
        theirs = types.ModuleType(kvcacheds_patch.MODULE)
        exec(_STANDIN, vars(theirs))
        self.patch = theirs.NixlConnectorPatch()

    def apply_theirs(self, **how):
        self.patch.patch_connector(self.connector, self.worker, **how)

    def answers(self):
        return (
            self.worker().register_kv_caches({}),
            self.connector.get_required_kvcache_layout(None),
        )


@pytest.fixture(params=[True, False], ids=["hook of its own", "hook of a base"])
def world(request):
    yield World(own_hook=request.param)
    del sys.modules[MODULE]


def _ours(wrapped, instance, *args, **kwargs):
    return f"ours over {wrapped(*args, **kwargs)}"


SITES = {REGISTER: _ours, LAYOUT: _ours}
OURS = ("ours over vLLM's",) * 2
THEIRS = ("kvcached's",) * 2


def test_theirs_first_is_put_aside_and_put_back(world):
    world.apply_theirs()
    before = [dict(vars(kind)) for kind in world.classes]
    ledger = Ledger()

    behind = ledger.apply("p", SITES, supersede=True)
    ledger.supersede("s")

    assert world.answers() == OURS
    assert str(REGISTER) in behind
    assert ledger.undo() == []
    assert [dict(vars(kind)) for kind in world.classes] == before
    assert world.answers() == THEIRS


def test_enabled_again_ours_are_in_front_again(world):
    ledger = Ledger()
    for _ in range(2):
        ledger.apply("p", SITES, supersede=True)
        world.apply_theirs()
        assert world.answers() == THEIRS
        assert len(ledger.supersede("s")) == 2
        assert world.answers() == OURS
        ledger.undo()
        assert world.answers() == THEIRS


def test_without_their_original_it_is_refused(world):
    world.apply_theirs(keep=False)

    with pytest.raises(SiteDrifted, match="expected parameters"):
        Ledger().apply("p", {REGISTER: _ours}, supersede=True)


def test_somebody_elses_replacement_is_not_taken_for_theirs(world):
    def _patched_register(self, kv_caches, *args):
        return "somebody's"

    world.worker._kvcached_original_register_kv_caches = world.worker.register_kv_caches
    world.worker.register_kv_caches = _patched_register

    with pytest.raises(SiteDrifted, match="expected parameters"):
        Ledger().apply("p", {REGISTER: _ours}, supersede=True)


# --- what the connector asks vLLM for ----------------------------------------------------------


_ASKED = [facts for facts in FACTS.values() if PATCH.sites(facts)]


@pytest.mark.parametrize("is_kvcacheds", [True, False])
@pytest.mark.parametrize("facts", _ASKED, ids=lambda facts: facts.release)
def test_the_connectors_wish_holds_where_vllm_makes_the_views(facts, is_kvcacheds, monkeypatch):
    monkeypatch.setenv("ENABLE_KVCACHED", "true" if is_kvcacheds else "false")
    (ask,) = PATCH.sites(facts).values()

    found = ask(lambda config: "HND", None, None)

    by_vllm = Version(facts.release) >= Version("0.29")
    assert found == ("HND" if by_vllm or not is_kvcacheds else None)
