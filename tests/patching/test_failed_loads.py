"""Which loads the scheduler is told of, and when, where a release has it wrong.

The workers here are stand-ins that carry what the adapters read; the lab runs the
same patch on every release's real worker.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvpatch._versions import GENERATIONS
from kvpatch.patches.failed_loads import PATCH
from kvpatch.vllm.failures import Failures, Unreported, pop_one_by_one, report_failed

pytestmark = pytest.mark.patching


class TestSeveralGroups:
    def test_what_did_not_fail_is_reported(self):
        failures = Failures()
        assert failures.sift({"a", "b"}, (), ("a", "b")) == {"a", "b"}

    def test_a_failed_load_is_held_back_until_its_request_is_over(self):
        failures = Failures()
        failures.add("a")
        assert failures.sift({"a", "b"}, (), ("a", "b")) == {"b"}
        assert failures.sift(set(), (), ()) == set()
        assert failures.sift({"c"}, {"a"}, ()) == {"a", "c"}, "its blocks can be freed now"
        assert failures.sift(set(), {"a"}, ()) == set(), "once"

    def test_a_request_that_was_given_up_before_its_load_failed(self):
        failures = Failures()
        assert failures.sift(set(), {"a"}, ("a",)) == set()
        failures.add("a")
        assert failures.sift({"a"}, (), ("a",)) == {"a"}

    def test_a_failure_of_one_transfer_of_several_is_kept_until_all_are_done(self):
        failures = Failures()
        failures.add("a")
        assert failures.sift(set(), (), ("a",)) == set()
        assert failures.sift({"a"}, (), ("a",)) == set()

    def test_what_the_worker_books_as_failed_is_held_back(self):
        failures = Failures()
        worker = _worker(failed={"a"}, failures=failures, a=([1], [2]), b=([3], [4]))
        worker._failed_recv_reqs.add("b")

        received = report_failed(worker, worker._failed_recv_reqs) | {"c"}

        assert received == {"a", "b", "c"}
        assert failures.sift(received, (), ("a", "b", "c")) == {"c"}


def _worker(*, failed=(), reading=(), failures=None, **blocks):
    """A stand-in: requests that are loaded, by name, with their blocks."""
    return SimpleNamespace(
        nixl_wrapper=_NixlAgent(),
        _failed_recv_reqs=Unreported(failed, failures),
        _recving_transfers=dict.fromkeys(reading, [1]),
        _recving_metadata={
            name: SimpleNamespace(local_block_ids=found) for name, found in blocks.items()
        },
        _invalid_block_ids=set(),
    )


class TestReporting:
    def test_the_release_finds_no_failed_request(self):
        worker = _worker(failed={"a"}, a=[1])
        worker._failed_recv_reqs.add("b")
        done = {"c"}
        done.update(worker._failed_recv_reqs)
        worker._failed_recv_reqs.clear()

        assert done == {"c"}
        assert worker._failed_recv_reqs.take(()) == {"a", "b"}, "clearing takes nothing away"

    def test_a_failed_request_is_reported_once_and_forgotten(self):
        worker = _worker(failed={"a"}, a=[1], b=[2])

        assert report_failed(worker, worker._failed_recv_reqs) == {"a"}
        assert report_failed(worker, worker._failed_recv_reqs) == set()
        assert set(worker._recving_metadata) == {"b"}

    def test_not_while_another_of_its_reads_goes_on(self):
        worker = _worker(failed={"a"}, reading={"a"}, a=[1])
        assert report_failed(worker, worker._failed_recv_reqs) == set()
        assert set(worker._recving_metadata) == {"a"}, "the release looks it up"

        worker._recving_transfers.clear()

        assert report_failed(worker, worker._failed_recv_reqs) == {"a"}

    @pytest.mark.parametrize("blocks", [[], (), ([], [])])
    def test_not_one_that_nothing_was_to_be_loaded_for(self, blocks):
        worker = _worker(failed={"a"}, a=blocks)

        assert report_failed(worker, worker._failed_recv_reqs) == set()
        assert not worker._recving_metadata

    def test_one_whose_metadata_is_lost_had_a_transfer(self):
        worker = _worker(failed={"a"})
        assert report_failed(worker, worker._failed_recv_reqs) == {"a"}


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


class TestBrokenReads:
    TRANSFERS = {"a": [1], "broken": [(2, 0.5), (3, 0.5)], "running": [4], "b": [5]}  # noqa: RUF012

    @pytest.mark.parametrize("error", [_Disconnected("gone"), RuntimeError("state ERR")])
    def test_one_that_raises_fails_alone(self, error):
        worker, transfers, failed = _worker(), dict(self.TRANSFERS), []

        done = pop_one_by_one(
            worker, _pop_done(worker, error), transfers, (RuntimeError,), failed.append
        )

        assert done == {"a", "b"}
        assert failed == ["broken"]
        assert transfers == {"running": [4]}
        assert sorted(worker.nixl_wrapper.released) == [1, 2, 3, 5]

    def test_one_that_cannot_be_released_twice(self):
        worker, transfers, failed = _worker(), {"broken": [2, 2]}, []

        pop_one_by_one(
            worker, _pop_done(worker, _Disconnected("gone")), transfers, (), failed.append
        )

        assert (failed, transfers) == (["broken"], {})

    def test_any_other_error_is_not_ours(self):
        worker = _worker()
        with pytest.raises(ZeroDivisionError):
            pop_one_by_one(
                worker, _pop_done(worker, ZeroDivisionError()), {"broken": [2]}, (), print
            )


def test_every_generation_before_0_30_has_it():
    assert set(PATCH.sites) == {g.slug for g in GENERATIONS[:-1]}
