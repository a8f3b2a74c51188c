"""Which loads the scheduler is told of, and when, where a release has it wrong.

The workers here are stand-ins that carry what the adapters read; the lab runs the
same patch on every release's real worker.
"""

from __future__ import annotations

import sys
from queue import Empty, Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.legacy.aborted_loads import AbortedBlocks
from kvpatch.legacy.failed_loads import (
    FailedGroupLoads,
    FailedRequests,
    pop_one_by_one,
    whole_requests,
)
from kvpatch.worker.state import engine_state


class TestSeveralGroups:
    def test_a_failure_of_one_transfer_of_several_is_kept_until_all_are_done(self):
        failures = FailedGroupLoads()
        failures.add("a")
        assert failures.report(set(), {"a": ([1], [2])}) == set()
        assert failures.take_invalid() == set()
        assert failures.report({"a"}, {"a": ([1], [2])}) == {"a"}
        assert failures.take_invalid() == {1, 2}

    def test_nobody_waits_for_one_without_blocks(self):
        failures = FailedGroupLoads()
        failures.add("a")
        assert failures.report({"a", "b"}, {"a": ([], []), "b": ([3], [4])}) == {"b"}
        assert failures.take_invalid() == set()

    def test_what_the_worker_books_as_failed_is_invalid(self):
        failures = FailedGroupLoads()
        worker = _worker(failed={"a"}, failures=failures, a=([1], [2]), b=([3], [4]))
        worker._failed_recv_reqs.add("b")

        received = worker._failed_recv_reqs.take() | {"c"}

        loading = {"a": ([1], [2]), "b": ([3], [4]), "c": ([5], [6])}
        assert failures.report(received, loading) == {"a", "b", "c"}
        assert failures.take_invalid() == {1, 2, 3, 4}


class _Request:
    """A stand-in for a scheduler's request of 40 tokens, 32 of which were to be loaded."""

    def __init__(self, name, status="WAITING_FOR_REMOTE_KVS"):
        self.request_id = name
        self.status = SimpleNamespace(name=status)
        self.num_computed_tokens = 40
        self.num_external_computed_tokens = 32


class TestWholeRequests:
    TABLES = {"a": ([1, 2], [3, 4]), "b": ([5, 6], [7, 8])}

    def _scheduler(self):
        return SimpleNamespace(kv_cache_manager=SimpleNamespace(get_block_ids=self.TABLES.get))

    @pytest.mark.parametrize("block", [1, 2, 3, 4])
    def test_a_block_of_any_group_fails_all_of_its_request(self, block):
        a, b = requests = _Request("a"), _Request("b")

        assert whole_requests(self._scheduler(), requests, {block}) == ({"a"}, 40, [])
        assert (a.num_computed_tokens, a.num_external_computed_tokens) == (0, 0)
        assert (b.num_computed_tokens, b.num_external_computed_tokens) == (40, 32)

    def test_one_that_runs_is_left_to_the_release(self):
        a, b = _Request("a", "RUNNING"), _Request("b", "RUNNING")

        assert whole_requests(self._scheduler(), (a, b), {2}) == (set(), 0, [a])
        assert a.num_computed_tokens == 40


class _Worker(SimpleNamespace):
    """Which can be referred to weakly, unlike its base."""


def _worker(*, failed=(), reading=(), failures=None, **blocks):
    """A stand-in: requests that are loaded, by name, with their blocks."""
    worker = _Worker(
        nixl_wrapper=_NixlAgent(),
        _recving_transfers=dict.fromkeys(reading, [1]),
        _recving_metadata={
            name: SimpleNamespace(local_block_ids=found) for name, found in blocks.items()
        },
        _invalid_block_ids=set(),
    )
    worker._failed_recv_reqs = FailedRequests(worker, failed, failures)
    return worker


def _queued(worker):
    """Drains the queue of failed loads, as 0.22 to 0.29 do."""
    found, queue = set(), worker._failed_recv_reqs
    while not queue.empty():
        name = queue.get_nowait()
        assert name not in found
        found.add(name)
    with pytest.raises(Empty):
        queue.get_nowait()
    return found


@pytest.mark.parametrize("taken", [lambda worker: worker._failed_recv_reqs.take(), _queued])
class TestReporting:
    def test_a_failed_request_is_reported_once(self, taken):
        worker = _worker(failed=["a"], a=[1], b=[2], c=[3])
        for _ in range(2):
            worker._failed_recv_reqs.put("b")

        assert taken(worker) == {"a", "b"}
        assert taken(worker) == set()

    def test_not_while_another_of_its_reads_goes_on(self, taken):
        worker = _worker(failed=["a", "b"], reading=("a",), a=[1], b=[2])
        assert taken(worker) == {"b"}
        assert "a" in worker._recving_metadata, "the release looks it up"

        worker._recving_transfers.clear()

        assert taken(worker) == {"a"}

    @pytest.mark.parametrize("blocks", [[], (), ([], [])])
    def test_not_one_that_nothing_was_to_be_loaded_for(self, taken, blocks):
        worker = _worker(failed=["a"], a=blocks)

        assert taken(worker) == set()
        assert not worker._recving_metadata


def test_the_releases_own_queue_is_taken_over():
    own = Queue()
    own.put("a")

    assert _queued(_worker(failed=own, a=[1])) == {"a"}


class _Disconnected(Exception):
    """As NIXL's: of no class but Exception."""


class _NixlAgent:
    """A stand-in for NIXL's agent."""

    def __init__(self):
        self.released = []

    def release_xfer_handle(self, handle):
        if handle in self.released:
            raise _Disconnected("released before")
        self.released.append(handle)


@pytest.fixture(autouse=True)
def _bindings(monkeypatch):
    module = ModuleType("stand_in_for_nixl_api")
    module.nixlBind = SimpleNamespace(nixlRemoteDisconnectError=_Disconnected)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_NixlAgent, "__module__", module.__name__)


def _pop_done(worker, error):
    """A release's: one of state ERR raises, and takes what it has found along."""

    def pop_done(transfers):
        done = set()
        for name, handles in list(transfers.items()):
            if "broken" in name:
                raise error
            if "running" not in name:
                done.add(name)
                del transfers[name]
                for handle in handles:
                    worker.nixl_wrapper.release_xfer_handle(handle)
        return done

    return pop_done


@pytest.mark.parametrize("error", [_Disconnected("gone"), RuntimeError("state ERR")])
def test_a_read_that_raises_fails_alone(error):
    """Whose handles are let go of, where they can be: one is none for the second time."""
    worker, failed = _worker(), []
    transfers = {"a": [1], "broken": [(2, 0.5), (2, 0.5), 3], "running": [4], "b": [5]}

    done = pop_one_by_one(worker, _pop_done(worker, error), transfers, failed.append)

    assert done == {"a", "b"}
    assert failed == ["broken"]
    assert transfers == {"running": [4]}
    assert sorted(worker.nixl_wrapper.released) == [1, 2, 3, 5]


# --- what the scheduler knows of a name whose request ends while it is loaded ------------------


def _core(release: str, **names: set[str]) -> Any:
    loading = SimpleNamespace(
        kv_transfer_params={"remote_engine_id": "P"},
        status=SimpleNamespace(name="WAITING_FOR_REMOTE_KVS"),
    )
    core = SimpleNamespace(
        requests={"a": loading, "b": loading}, finished_recving_kv_req_ids=set(), **names
    )
    vars(engine_state(core))["facts"] = FACTS[release]
    return core


def test_a_failed_load_that_ends_fails_no_later_one_of_its_name() -> None:
    """vLLM <= 0.15 keeps the name: it would compute what the next request has loaded."""
    core = _core("0.13.0", failed_recving_kv_req_ids={"a", "b"})
    with AbortedBlocks().ending(core, ["a", "c"]):
        pass
    assert core.failed_recving_kv_req_ids == {"b"}


def test_where_no_load_fails_there_are_no_names() -> None:
    with AbortedBlocks().ending(_core("0.11.0"), ["a"]):
        pass
