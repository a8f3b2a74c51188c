"""In which order a release's model runners call the connector: what checks of loads lean on.

The words of new holds are written, and digests are begun, in ``bind_connector_metadata``, before
the model runs. A load that fails a check is found where the worker is asked for its results, and
its name is handed over where it is asked for blocks that could not be loaded.
"""

from __future__ import annotations

import re

import pytest

from kvpatch.core.releases import FACTS, RELEASES

from .facts import Source

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("trees")]

_MIXIN = "vllm.v1.worker.kv_connector_model_runner_mixin"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SECOND = "vllm.v1.worker.gpu.kv_connector"
_RESULTS = r"(get_finished|get_transfer_results|get_finished_kv_transfers)\("


def in_order(body: str, *patterns: str) -> bool:
    """Whether each is first found behind the one before."""
    places = [re.search(pattern, body) for pattern in patterns]
    found = [place.start() for place in places if place is not None]
    return len(found) == len(patterns) and found == sorted(found)


def steps_of(release: str) -> str:
    """What the first runner does in a step, from the connector's metadata to its results."""
    source = Source(release)
    for name in ("_get_kv_connector_output", "maybe_setup_kv_connector"):
        found = source.body(_MIXIN, f"KVConnectorModelRunnerMixin.{name}")
        if found:
            return found
    return source.body(_RUNNER, "GPUModelRunner.execute_model")


@pytest.mark.parametrize("release", RELEASES)
def test_metadata_comes_before_the_model_and_results_after(release):
    source, body = Source(release), steps_of(release)
    if "yield" in body:
        wanted = (r"\.bind_connector_metadata\(", r"\byield\b", rf"\.{_RESULTS}")
        assert in_order(body, *wanted), body
    else:  # 0.10.x: one method sets up, and the runner calls it and what comes after
        body = source.body(_RUNNER, "GPUModelRunner.execute_model")
        wanted = (r"maybe_setup_kv_connector\(", r"self\.model\(", _RESULTS)
        assert in_order(body, *wanted)
    if FACTS[release].failed_loads != "unknown":
        assert in_order(body, _RESULTS, r"\.get_block_ids_with_load_errors\(")


@pytest.mark.parametrize("release", RELEASES)
def test_the_second_runner_does_likewise(release):
    source = Source(release)
    before, after = (
        source.body(_SECOND, f"ActiveKVConnector.{name}")
        for name in ("pre_forward", "post_forward")
    )
    if not before:
        assert source.body(_SECOND, "ActiveKVConnector.__init__") == ""
        return
    assert ".bind_connector_metadata(" in before
    assert in_order(after, rf"\.{_RESULTS}", r"\.get_block_ids_with_load_errors\(")


def test_negative_control_another_order_is_noticed():
    assert not in_order("results() then bind()", r"bind\(", r"results\(")
    assert not in_order("bind()", r"bind\(", r"results\(")
