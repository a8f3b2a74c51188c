"""Names of requests among blocks that could not be loaded: who puts them there, who takes them."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.errors import (
    AnswerGone,
    KvpatchError,
    ReadRefused,
    UnlikePrompts,
    UnpairableBlocks,
)
from kvpatch.load.prompt_hashes import FIELD
from kvpatch.load.reader import Loads
from kvpatch.observe.book import Book
from kvpatch.patches import stale_blocks
from kvpatch.worker.state import worker_state

WAITING = SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")
RUNNING = SimpleNamespace(name="RUNNING")


def connector(*names: str) -> Any:
    worker = SimpleNamespace()
    worker_state(worker).kept[Loads] = SimpleNamespace(failed_checks=deque(names))
    return SimpleNamespace(connector_worker=worker)


@pytest.mark.parametrize(
    ("kind", "named"),
    [(AnswerGone, True), (UnlikePrompts, True), (UnpairableBlocks, True), (ReadRefused, False)],
)
def test_what_p_no_longer_holds_is_computed(kind: type[KvpatchError], named: bool) -> None:  # noqa: FBT001
    """Whatever the policy for failed transfers says; other refusals are left to it."""
    reader = SimpleNamespace(book=Book(), failed_checks=deque())
    reader.context = SimpleNamespace(is_refused=False, request_id="a")
    for _ in range(2):  # it may read from several ranks
        with pytest.raises(kind), Loads.refusals(reader):
            raise kind("gone", "send it to P again")
    assert set(reader.failed_checks) == ({"a"} if named else set())


def core(**statuses: Any) -> Any:
    """Fake: a scheduler whose requests have a block of ten each, one more, and the null block."""
    found = {
        name: SimpleNamespace(status=s, num_computed_tokens=64, kv_transfer_params=None)
        for name, s in statuses.items()
    }
    tables = {name: ([0, 10 * n], [10 * n + 1]) for n, name in enumerate(found, 1)}
    return SimpleNamespace(
        requests=found,
        failed_recving_kv_req_ids=set(),
        kv_cache_manager=SimpleNamespace(
            get_block_ids=tables.__getitem__,
        ),
        vllm_config=SimpleNamespace(),
        running=[SimpleNamespace(request_id=n) for n, s in statuses.items() if s == RUNNING],
    )


def output(invalid: set[Any], failed: set[str] = frozenset()) -> Any:
    return SimpleNamespace(invalid_block_ids=invalid, failed_recving=failed)


def test_a_worker_names_each_of_them_once() -> None:
    one = connector("a", "b", "a")
    assert stale_blocks.name_requests(one, {1}) == {1, "a", "b"}
    assert stale_blocks.name_requests(one, {2}) == {2}


def test_who_is_named_is_computed_and_its_blocks_fail_nobody() -> None:
    """As several workers' sets are joined, with blocks of a transfer of another request."""
    scheduler, found = core(a=WAITING, b=WAITING), output({10, 11, 20} | {"a"})
    stale_blocks.compute_again(scheduler, found)
    assert found.invalid_block_ids == {20}
    assert scheduler.failed_recving_kv_req_ids == {"a"}
    assert scheduler.requests["a"].num_computed_tokens == 0
    assert scheduler.requests["b"].num_computed_tokens == 64


def test_a_block_that_another_request_has_too_fails_that_one() -> None:
    """Another connector could not load it, and it is a prefix hit of the request that is named."""
    scheduler, found = core(a=WAITING, b=RUNNING), output({0, 10, 11, "a"})
    tables = {"a": ([0, 10], [11]), "b": ([0, 10], [21])}
    scheduler.kv_cache_manager.get_block_ids = tables.__getitem__
    stale_blocks.compute_again(scheduler, found)
    assert found.invalid_block_ids == {10}
    assert scheduler.failed_recving_kv_req_ids == {"a"}


def test_another_connectors_request_loses_all_that_is_reported_of_it() -> None:
    """Its ranks report blocks of one load in several steps, and its first tokens are kept."""
    scheduler, found = core(b=WAITING), output({11})
    scheduler.failed_recving_kv_req_ids.add("b")
    stale_blocks.compute_again(scheduler, found)
    assert found.invalid_block_ids == {11}


def test_who_lacks_ps_images_is_not_computed() -> None:
    """It stays a load that failed: what D computes of placeholders is another prompt's."""
    scheduler, found = core(a=WAITING), output({10, 11, "a"})
    request = scheduler.requests["a"]
    request.kv_transfer_params = {FIELD: "1/2/2//AAAAAAAA"}  # P numbers them
    request.prompt_token_ids, request.mm_features = [1, 2], []
    stale_blocks.compute_again(scheduler, found)
    assert found.invalid_block_ids == {10, 11}
    assert not scheduler.failed_recving_kv_req_ids
    image = SimpleNamespace(data=None)
    image.mm_position = SimpleNamespace(offset=0, length=1)
    request.mm_features = [image]
    for image.data in (None, {"image_grid_thw": None}):
        stale_blocks.compute_again(scheduler, output({10, 11, "a"}))
        assert not scheduler.failed_recving_kv_req_ids, "it ends the engine"
    image.data = {"pixel_values": None}
    stale_blocks.compute_again(scheduler, output({10, 11, "a"}))
    assert scheduler.failed_recving_kv_req_ids == {"a"}


@pytest.mark.parametrize("statuses", [{}, {"a": RUNNING}])
def test_who_waits_for_no_load_is_left_alone(statuses: dict[str, Any]) -> None:
    scheduler, found = core(**statuses), output({10, "a"})
    stale_blocks.compute_again(scheduler, found)
    assert found.invalid_block_ids == {10}
    assert not scheduler.failed_recving_kv_req_ids


def test_a_rank_that_is_through_later_does_not_fail_it_after_all() -> None:
    """From 0.30 a request is reported as failed once all its ranks are through."""
    scheduler = core(a=WAITING, b=WAITING)
    stale_blocks.compute_again(scheduler, output({10, "a"}))
    failed: list[set[str]] = []
    later = output(set(), {"a", "b"})
    stale_blocks.compute_again(scheduler, later)
    stale_blocks._handle_failed_recving(failed.append, scheduler, later.failed_recving)
    assert failed == [{"b"}]
    assert later.failed_recving == {"a", "b"}, "other connectors hear that it has failed"
