"""Has D compute what a check of kvpatch's has failed, whatever ``kv_load_failure_policy`` says.

The policy is there for transfers that failed. Names of requests travel among the ids of blocks that
could not be loaded, a set that executors hand on and join. The scheduler takes them out before the
release looks, and does what that does to compute a load again (``_handle_failed_recving``).
"""

from __future__ import annotations

from typing import Any

from kvpatch.load.reader import Reader
from kvpatch.worker.state import worker_state


def name_requests(connector: Any, blocks: set[int]) -> set[Any]:
    """Adds to the blocks that could not be loaded the names of requests that failed a check."""
    reader = worker_state(connector.connector_worker).held(Reader)
    names = () if reader is None else reader.failed_checks
    if not names:
        return blocks
    return blocks.union(names.popleft() for _ in range(len(names)))


def compute_again(core: Any, output: Any) -> None:
    """Has vLLM's scheduler compute the requests that are named among invalid blocks."""
    invalid = output.invalid_block_ids
    if not invalid:
        return
    names = {one for one in invalid if isinstance(one, str)}
    for name in names:
        request = core.requests.get(name)
        if request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS":
            request.num_computed_tokens = 0
            core.failed_recving_kv_req_ids.add(name)
    # Of several cache groups a request's blocks may be reported steps behind its name.
    for name in core.failed_recving_kv_req_ids:
        if name in core.requests:
            invalid = invalid.difference(*core.kv_cache_manager.get_block_ids(name))
    output.invalid_block_ids = invalid - names


def compute_failed_again(core: Any, output: Any) -> None:
    """Does so on releases that report requests as failed (from 0.30).

    They report with the last of a request's ranks, which may be steps after the first.
    """
    compute_again(core, output)
    if output.failed_recving:
        output.failed_recving = output.failed_recving - core.failed_recving_kv_req_ids
