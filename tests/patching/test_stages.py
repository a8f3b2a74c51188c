"""D with several pipeline stages: P keeps a request's blocks until each of them has read.

The installed release's own code counts D's readers, and P's notifications.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.installed import installed_facts
from kvpatch.load.read_dispatch import request_read
from kvpatch.load.read_request import PlannedLoad, PlannedLoads, attach_read_requests
from kvpatch.worker.state import scheduler_state

pytestmark = pytest.mark.skipif(
    not installed_facts().names_regions, reason="such a D computes its prompts (<= 0.29)"
)


class _Request:
    arrival_time, kv_transfer_params, prefill_stats = 0.0, None, None
    num_computed_tokens = 16


def _entry(stages: int, *, has_stock_workers: bool = False) -> Any:
    """Returns the entry of a load, with what D's scheduler writes on it."""
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=None)
    scheduler = SimpleNamespace(vllm_config=config)
    state = scheduler_state(scheduler)
    state.has_stock_workers = has_stock_workers
    request = _Request()
    state.of(PlannedLoads)[request] = PlannedLoad(16, 16)
    entry = SimpleNamespace(
        local_block_ids=(), remote=SimpleNamespace(engine_id="p", block_ids=([1],))
    )
    metadata = SimpleNamespace(reqs_to_recv={"r": entry})
    attach_read_requests(scheduler, {"r": (request,)}, metadata)
    return entry


def _readers(stages: int, ranks: tuple[int, int], *, has_stock_workers: bool = False) -> int:
    """Returns how many readers D names to P with its second load, after one in between."""
    from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping

    p_size, d_size = ranks
    topology = object.__new__(TransferTopology)
    topology.__dict__.update(tp_rank=0, tp_size=d_size, dcp_size=1)
    worker: Any = SimpleNamespace(tp_mappings={}, _remote_agents={})
    entry = _entry(stages, has_stock_workers=has_stock_workers)
    with request_read(worker, "r", entry):  # before the handshake
        assert not worker.tp_mappings
    found = []
    for _ in range(2):  # the peer shakes hands again
        count = topology.dcp_consumer_count(p_size, 1)
        worker.tp_mappings["p"] = TPMapping((), (), {}, 0, count)
        for _ in range(2):
            with request_read(worker, "r", entry):
                found.append(int(worker.tp_mappings["p"].local_consumers))
    assert len({*found}) == 1
    return found[0]


@pytest.mark.parametrize(
    ("stages", "ranks", "readers"),
    [(1, (1, 1), 1), (2, (1, 1), 2), (3, (2, 4), 6), (1, (2, 4), 2), (2, (4, 2), 2)],
)
def test_p_is_told_of_the_readers_of_all_stages(
    stages: int, ranks: tuple[int, int], readers: int
) -> None:
    assert _readers(stages, ranks) == readers


def _freed(notifications: list[str]) -> list[bool]:
    """Returns behind which of the stages' notifications P frees the request's blocks."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )

    sent = [{"d": [words.encode()]} for words in notifications]
    p = SimpleNamespace(
        transfer_topo=object(),
        nixl_wrapper=SimpleNamespace(get_new_notifs=lambda: sent.pop(0)),
        _reqs_to_send={"r": 1.0},
        _reqs_to_process={"r"},
        consumer_notification_counts_by_req=defaultdict(int),
        expected_consumer_notifications_by_req={},
        xfer_stats=SimpleNamespace(record_notification_after_expiry=lambda: None),
    )
    return [bool(NixlPullConnectorWorker._get_new_notifs(p)) for _ in notifications]


def test_p_frees_a_requests_blocks_behind_the_last_stages_notification() -> None:
    assert _freed([f"r:{_readers(2, (1, 1))}"] * 2) == [False, True]


def test_p_frees_them_where_a_stage_has_no_kvpatch() -> None:
    """That stage counts its own readers, as the release does: P goes by the last number."""
    patched = f"r:{_readers(2, (1, 1), has_stock_workers=True)}"

    assert _freed([patched, "r:1"]) == [True, False]
    assert _freed(["r:2", "r:1"]) == [False, False], "P would keep them for their lease"
