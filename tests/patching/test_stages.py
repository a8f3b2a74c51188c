"""D with several pipeline stages: P keeps a request's blocks until each of them has read.

The installed release's own code counts D's readers, and P's notifications.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.installed import installed_facts
from kvpatch.load.remote_agents import Handshake
from kvpatch.peer.decision import Stock
from kvpatch.worker.release_worker import ReleaseWorker

pytestmark = pytest.mark.skipif(
    not installed_facts().names_regions, reason="such a D computes its prompts (<= 0.29)"
)


def _readers(stages: int, ranks: tuple[int, int]) -> int:
    """Returns how many readers D names to P, after P's ranks have been added one by one."""
    from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping

    p_size, d_size = ranks
    topology = object.__new__(TransferTopology)
    topology.__dict__.update(tp_rank=0, tp_size=d_size, dcp_size=1)
    worker: Any = SimpleNamespace(
        tp_mappings={},
        num_blocks=4,
        backend_name="FLASH_ATTN",
        enable_heterogeneous_attn_post_process=False,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=stages)),
    )
    added = set()

    def add(metadata: Any, tp_rank: int, tp_size: int, contexts: int) -> str:
        if tp_rank not in added:
            added.add(tp_rank)
            count = topology.dcp_consumer_count(tp_size, contexts)
            worker.tp_mappings[metadata.engine_id] = TPMapping((), (), {}, 0, count)
        return f"agent {tp_rank}"

    metadata = SimpleNamespace(
        engine_id="p",
        attn_backend_name="FLASH_ATTN",
        kv_caches_base_addr=[1],
        region_num_blocks=None,
        num_blocks=4,
    )
    release = ReleaseWorker(worker, installed_facts())
    for tp_rank in (*range(p_size), 0):  # once more, which the release skips
        assert Handshake(add, release, metadata, tp_rank, p_size, (1,)).act(Stock()) == (
            f"agent {tp_rank}"
        )
    return int(worker.tp_mappings["p"].local_consumers)


@pytest.mark.parametrize(
    ("stages", "ranks", "readers"),
    [(1, (1, 1), 1), (2, (1, 1), 2), (3, (2, 4), 6), (1, (2, 4), 2), (2, (4, 2), 2)],
)
def test_p_is_told_of_the_readers_of_all_stages(
    stages: int, ranks: tuple[int, int], readers: int
) -> None:
    assert _readers(stages, ranks) == readers


def test_p_frees_a_requests_blocks_behind_the_last_stages_notification() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )

    sent = [{f"d{stage}": [f"r:{_readers(2, (1, 1))}".encode()]} for stage in range(2)]
    p = SimpleNamespace(
        transfer_topo=object(),
        nixl_wrapper=SimpleNamespace(get_new_notifs=lambda: sent.pop(0)),
        _reqs_to_send={"r": 1.0},
        _reqs_to_process={"r"},
        consumer_notification_counts_by_req=defaultdict(int),
        expected_consumer_notifications_by_req={},
    )

    assert NixlPullConnectorWorker._get_new_notifs(p) == set()
    assert NixlPullConnectorWorker._get_new_notifs(p) == {"r"}
    assert not p._reqs_to_send
