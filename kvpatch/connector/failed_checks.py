"""Has D compute what a check of kvpatch's has failed, whatever ``kv_load_failure_policy`` says.

The policy is the operator's, for transfers that failed. A check fails a load whose peer is well and
whose bytes are all here: D can do without them.

The names of such requests travel among the ids of the blocks that could not be loaded, which
executors hand on and join as a set. The scheduler takes them out before the release looks, and
does what the release does with a load that is computed again (``_handle_failed_recving``).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvpatch.connector.state import held_by

#: Where nobody takes them the oldest go.
_MOST = 65536


class FailedChecks(deque[str]):
    """The names of one worker's requests whose loads a check has failed, on whatever thread."""

    def __init__(self) -> None:
        super().__init__(maxlen=_MOST)


def name_requests(connector: Any, blocks: set[int]) -> set[Any]:
    """Adds to the blocks that could not be loaded the names of requests that failed a check."""
    names = held_by(getattr(connector, "connector_worker", None), FailedChecks)
    if not names:
        return blocks
    return blocks.union(names.popleft() for _ in range(len(names)))


def compute_again(core: Any, output: Any) -> None:
    """Has vLLM's scheduler compute the requests that are named among invalid blocks.

    Args:
        output: of the workers' connectors.
    """
    invalid = output.invalid_block_ids
    if not invalid:
        return
    names = {one for one in invalid if isinstance(one, str)}
    for name in names:
        request = core.requests.get(name)
        if request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS":
            invalid = invalid.difference(*core.kv_cache_manager.get_block_ids(name))
            request.num_computed_tokens = 0
            core.failed_recving_kv_req_ids.add(name)
    output.invalid_block_ids = invalid - names


def compute_failed_again(core: Any, output: Any) -> None:
    """As :func:`compute_again`, of releases that report requests as failed (from 0.30).

    They do so with the last of a request's ranks, which may be steps after the first.
    """
    compute_again(core, output)
    if output.failed_recving:
        output.failed_recving = output.failed_recving - core.failed_recving_kv_req_ids
