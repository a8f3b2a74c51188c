"""What goes wrong most is found, and is not found where it is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpatch.tools.planning.engine import Pair
from kvpatch.tools.planning.plan import findings
from kvpatch.tools.planning.verdicts import start_problems

from .walk import extra, planned_engine, transfer

pytestmark = pytest.mark.patching

_HOST, _PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


def _found(folder: Path, p: dict[str, Any], d: dict[str, Any]) -> list[tuple[str, str, str]]:
    engines = [planned_engine(folder, role, **of) for role, of in (("p", p), ("d", d))]
    return [(one.level, one.side, one.what) for one in findings(Pair(*engines))]


def _on(machine: str | None, **env: str | None) -> dict[str, Any]:
    return {"about": {"machine": machine}, "env": env}


#: name: P's changes, D's, and all that is found: level, side, words.
CASES: dict[str, tuple[Any, ...]] = {
    "all is set up rightly": ({}, {}),
    "an engine without an API server shares no port": (
        {"about": {"machine": "a", "api-server": False}, "env": {_PORT: "5601"}},
        {"about": {"machine": "a", "api-server": False}, "env": {_PORT: "5701"}},
    ),
    "addresses and machines of a shell, which may be one": (
        _on("$P", **{_HOST: "$P"}), _on("$D", **{_HOST: "$D"}),
        ("warning", "P", "$P"), ("warning", "P and D", ""), ("warning", "P and D", ""),
    ),
    "a wildcard between machines": (
        {"env": {_HOST: "0.0.0.0"}}, {}, ("error", "P", "tells D to connect to 0.0.0.0"),
    ),
    "a loopback between machines": (
        {"env": {_HOST: "localhost"}}, {}, ("error", "P", "D is on another machine"),
    ),
    "nothing set between machines": (
        {"env": {_HOST: None}}, {}, ("error", "P", f"{_HOST} is unset"),
    ),
    "127.0.0.1 between machines": (
        {"env": {_HOST: "127.0.0.1"}}, {}, ("error", "P", "is 127.0.0.1, and D is on another"),
    ),
    "one port on one machine": (
        {"port": 8100, **_on("a", **{_HOST: "127.0.0.1"})},
        {"port": 8200, **_on("a", **{_HOST: "127.0.0.1"})},
        ("error", "P and D", "side channel's port 5600"),
    ),
    "one port of API servers": (
        _on("a", **{_PORT: "5601"}), _on("a", **{_PORT: "5701"}),
        ("error", "P and D", "API servers have port 8000"),
    ),
    "ports of data-parallel ranks": (
        {"port": 1, "data_parallel_size": 8, **_on("a", **{_PORT: "5600"})},
        {"port": 2, **_on("a", **{_PORT: "5607"})},
        ("error", "P and D", "side channel's port 5607"),
    ),
    "no connector": (
        {"kv_transfer_config": None}, {}, ("error", "P", "no --kv-transfer-config"),
    ),
    "no role": (
        {}, {"kv_transfer_config": '{"kv_connector": "NixlConnector"}'},
        ("error", "D", "kv_role is not set"),
    ),
    "the other side's role": (
        transfer(kv_role="kv_consumer"), {},
        ("error", "P", "the other side's"),
    ),
    "plugins without kvpatch": (
        {}, {"env": {"ENABLE_KVPATCH": "1", "VLLM_PLUGINS": "lora_filesystem_resolver"}},
        ("error", "D", "does not name kvpatch"),
    ),
    "settings of kvpatch's while it is off": (
        {}, {"env": {"KVPATCH_DIGEST": "all"}}, ("warning", "D", "KVPATCH_DIGEST is set"),
    ),
    "a value that kvpatch cannot take": (
        {}, {"env": {"ENABLE_KVPATCH": "true", "KVPATCH_DIGEST": "some"}},
        ("error", "D", "KVPATCH_DIGEST='some' is not one of off, sample, all"),
    ),
    "a switch that is neither on nor off": (
        {}, {"env": {"ENABLE_KVPATCH": "on"}}, ("error", "D", "ENABLE_KVPATCH='on' is neither"),
    ),
    "a shell's variable for an address": (
        {"env": {_HOST: "$NODE_1"}}, {}, ("warning", "P", "$NODE_1, which no shell"),
    ),
    "unlike leases": (
        extra(kv_lease_duration=300), {}, ("warning", "P and D", "is 300 and 30"),
    ),
    "an entry that vLLM does not read": (
        {}, extra(kv_leas_duration=300), ("warning", "D", "did you mean kv_lease_duration?"),
    ),
    "an entry in the wrong place": (
        {}, extra(kv_load_failure_policy="fail"),
        ("warning", "D", "no kv_load_failure_policy in kv_connector_extra_config"),
    ),
    "prompts of a P without kvpatch, which D refuses": (
        {}, {"env": {"ENABLE_KVPATCH": "true", "KVPATCH_REQUIRE_TOKENS": "true"}},
        ("warning", "P", "D computes every prompt"),
    ),
    "float32 for FLASH_ATTN": (
        {"dtype": "float32"}, {}, ("error", "P", "FLASH_ATTN takes no --dtype float32"),
    ),
    "Ray": (
        {}, {"distributed_executor_backend": "ray", "env": {"ENABLE_KVPATCH": "true"}},
        ("warning", "D", "its workers are Ray's"),
    ),
    "several nodes": (
        {}, {"nnodes": 2, "env": {"ENABLE_KVPATCH": "true"}}, ("warning", "D", "on 2 nodes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_found(name, tmp_path):
    p, d, *expected = CASES[name]

    found = _found(tmp_path, p, d)

    assert [one[:2] for one in found] == [one[:2] for one in expected], found
    assert all(words in what for (*_, what), (*_, words) in zip(found, expected, strict=True))


def test_another_devices_buffer(tmp_path):
    about = {"platform": "cpu", "attention-backend": "CPU_ATTN"}
    for asked, count in (({}, 0), (transfer(kv_buffer_device="cuda"), 1)):
        engine = planned_engine(tmp_path, "p", about=about, block_size=128, **asked)
        found = list(start_problems(engine))

        assert ["kv_buffer_device cuda is not for cpu" in one for one, _ in found] == [True] * count


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float32", "about": {"attention-backend": None}}, "chooses TRITON_ATTN"),
        (
            {"about": {"attention-backend": "FLASHINFER"}, "env": {"VLLM_KV_CACHE_LAYOUT": "NHD"}},
            "no Blackwell",
        ),
    ],
)
def test_what_depends_on_the_card_is_assumed_aloud(changes, says, tmp_path):
    assert says in " ".join(planned_engine(tmp_path, "p", **changes).assumed)
