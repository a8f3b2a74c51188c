"""An engine's description beside what it states once it runs, at its handshake and over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpatch.core.errors import BadOptions
from kvpatch.core.installed import installed_vllm
from kvpatch.tools.engine_report import report_of, text_of
from kvpatch.tools.planning.arguments import published_by
from kvpatch.tools.verify.engine import HOST, Engine, command, environment
from tests.lab.side_channel import ask_patiently, question

_ROOT = Path(__file__).resolve().parents[2]
_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


def described(engine: Engine) -> dict[str, Any]:
    """The description of an engine that is started as this one was."""
    variables = environment(engine.spec, {}, 0)
    words = [*(f"{name}={value}" for name, value in variables.items() if name != "PYTHONPATH")]
    inherited = {n: v for n, v in os.environ.items() if n != "TEST_ENGINE_ANCESTOR"}
    path = os.pathsep.join((str(_ROOT), inherited.get("PYTHONPATH", "")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvpatch", "describe", "--", *words),
            *command(engine.spec, engine.port),
        ],
        capture_output=True, text=True, cwd=_ROOT, check=False,
        env=inherited | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def disagreements(engine: Engine) -> list[str]:
    """What the description has otherwise than the engine; a spoilt one must be noticed."""
    planned = described(engine)
    told = json.loads(text_of(engine.url, "/server_info?config_format=json", 60.0))
    port = int(told["vllm_env"][_PORT])
    answer = ask_patiently(port, b"", question(installed_vllm().version, 0))
    assert answer is not None
    payload = msgspec.msgpack.decode(answer[1])  # behind an empty frame

    spoilt = json.loads(json.dumps(planned))
    spoilt["caches"]["layers"][0]["page_bytes"] += 1
    spoilt["hash"]["digest"] = ""
    assert list(_unlike(spoilt, told, payload))[:2] == ["hash", "bytes"]
    unlike = [*_unlike(planned, told, payload), *_published_otherwise(engine, planned)]
    return [f"{engine.spec.name}: {name}" for name in unlike]


def _published_otherwise(engine: Engine, planned: dict[str, Any]) -> Iterator[str]:
    """The names of what a running engine publishes otherwise; a stock one publishes nothing."""
    if not engine.spec.kvpatch:
        with pytest.raises(BadOptions, match="has no description"):
            published_by(engine.url)
        return
    published = published_by(engine.url)
    assert planned["hash"]["digest"] in report_of(engine.url).sentences[0]
    assert published["about"].pop("running") is True
    for name in ("caches", "hash", "about", "vllm"):
        if published[name] != planned[name]:
            yield f"published {name}"
    asked = json.loads(json.dumps(planned["options"]))
    asked["kv_transfer_config"].pop("kv_connector_extra_config", None)
    for name in ("model", "kv_transfer_config"):
        if published["options"][name] != asked[name]:
            yield f"published {name}"
    said = json.dumps(published)
    if any(secret in said for secret in (HOST, _PORT, "_HOST", str(engine.port))):
        yield "an address is published"


def _unlike(
    planned: dict[str, Any], told: dict[str, Any], payload: dict[str, Any]
) -> Iterator[str]:
    """The names of what the two descriptions, and the handshake, have otherwise."""
    stated = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
    caches, about = planned["caches"], planned["about"]
    parts = caches["block_tokens"] // caches["kernel_tokens"]
    sizes = [layer["page_bytes"] // parts for layer in caches["layers"]]
    asked, config = planned["options"], told["vllm_config"]
    transfer = asked["kv_transfer_config"]
    pairs = {
        "hash": (planned["hash"]["digest"], payload["compatibility_hash"]),
        "bytes": (sizes, stated["block_lens"]),
        "kernel block": (caches["kernel_tokens"], stated["block_size"]),
        "layout": (caches["layout"], stated["kv_cache_layout"]),
        "backend": (about["attention-backend"], stated["attn_backend_name"]),
        "cut": (parts, stated["physical_blocks_per_logical_kv_block"]),
        "model": (asked["model"], config["model_config"]["model"]),
        "type": (
            caches["model_dtype"],
            str(config["model_config"]["dtype"]).removeprefix("torch."),
        ),
        "block": (caches["block_tokens"], config["cache_config"]["block_size"]),
        "ranks": (1, config["parallel_config"]["tensor_parallel_size"]),
        **{name: (one, config["kv_transfer_config"][name]) for name, one in transfer.items()},
    }
    assert len(pairs) > 12
    yield from (name for name, (one, other) in pairs.items() if one != other)
