"""Each worker and each scheduler has a state of its own, which ends with it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from kvpatch.core.recent_engines import RecentEngines, RecentRanks
from kvpatch.core.releases import FACTS
from kvpatch.worker.state import (
    connectors_of,
    engine_state,
    scheduler_state,
    share_with_manager,
    worker_state,
)


@pytest.mark.parametrize("state_of", [worker_state, scheduler_state, engine_state])
def test_two_of_one_process_have_nothing_in_common(state_of) -> None:
    one, other = SimpleNamespace(), SimpleNamespace()

    assert state_of(one) is state_of(one)
    assert state_of(one) is not state_of(other)
    mine, theirs = (vars(state_of(owner)).values() for owner in (one, other))
    shared = {id(value) for value in mine} & {id(value) for value in theirs}
    assert shared <= {id(None), id(False)}


@pytest.mark.parametrize("state_of", [worker_state, scheduler_state, engine_state])
def test_it_ends_with_its_owner(state_of) -> None:
    owner = SimpleNamespace()
    state = state_of(owner)
    state.back = owner  # as readers and agents lead back to their worker
    ended = weakref.ref(state)

    del owner, state
    gc.collect()

    assert ended() is None


def test_a_block_manager_has_its_schedulers_state() -> None:
    core = SimpleNamespace(kv_cache_manager=SimpleNamespace())

    share_with_manager(core)

    assert engine_state(core.kv_cache_manager) is engine_state(core)


def test_a_multi_connector_stands_for_several() -> None:
    one, two = SimpleNamespace(), SimpleNamespace()

    assert list(connectors_of(SimpleNamespace())) == []
    assert list(connectors_of(SimpleNamespace(connector=None))) == []
    assert list(connectors_of(SimpleNamespace(connector=one))) == [one]
    several = SimpleNamespace(_connectors=[one, two])
    assert list(connectors_of(SimpleNamespace(connector=several))) == [one, two]
    nested = SimpleNamespace(_connectors=[two, several])
    assert list(connectors_of(SimpleNamespace(connector=nested))) == [two, one, two]


@pytest.mark.parametrize("state_of", [worker_state, scheduler_state, engine_state])
def test_it_has_the_facts_of_this_processs_release(state_of, monkeypatch) -> None:
    monkeypatch.setenv("KVPATCH_GENERATION", "0.13.0")
    owner = SimpleNamespace()

    assert state_of(owner).facts is FACTS["0.13.0"]
    monkeypatch.setenv("KVPATCH_GENERATION", "0.14.0")
    assert state_of(owner).facts is FACTS["0.13.0"]


# --- what is kept of engines that come and go --------------------------------------------------


def test_the_oldest_is_forgotten_and_the_last_booked_is_not():
    found = RecentEngines[int]()
    for number in range(RecentEngines.most):
        found[f"e{number}"] = number
    found["e0"] = 7
    found["new"] = 8

    assert len(found) == RecentEngines.most
    assert "e1" not in found
    assert (found["e0"], found["new"]) == (7, 8)


def test_a_rank_that_is_used_is_not_forgotten():
    found = RecentRanks[int]()
    found["a"] = 0
    for number in range(2 * found.most):
        found[f"r{number}"] = number
        assert found.used("a") == 0
    assert len(found) == found.most
    assert found.used("nobody") is None
