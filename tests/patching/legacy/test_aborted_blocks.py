"""A request that ends while it is loaded, and what the scheduler goes on to know of its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvpatch.core.releases import FACTS
from kvpatch.legacy.aborted_loads import AbortedBlocks
from kvpatch.worker.state import engine_state


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
