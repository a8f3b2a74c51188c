"""An engine's description beside what it states once it runs, at its handshake and over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvpatch.core.installed import installed_vllm
from kvpatch.planning.running import description_of
from kvpatch.verify.engine import Engine, command, environment
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
    """What the description has otherwise than the engine; of several engines in turn."""
    planned, told = described(engine), description_of(engine.url)
    answer = ask_patiently(int(told["env"][_PORT]), b"", question(installed_vllm().version, 0))
    assert answer is not None
    payload = msgspec.msgpack.decode(answer[1])  # behind an empty frame
    stated = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
    caches = planned["caches"]
    parts = caches["block_tokens"] // caches["kernel_tokens"]
    pairs = {
        "hash": (planned["hash"]["digest"], payload["compatibility_hash"]),
        "kernel block": (caches["kernel_tokens"], stated["block_size"]),
        "layout": (caches["layout"], stated["kv_cache_layout"]),
        "backend": (planned["about"]["attention-backend"], stated["attn_backend_name"]),
        "bytes": (
            [layer["page_bytes"] // parts for layer in caches["layers"]], stated["block_lens"],
        ),
        "cut": (parts, stated["physical_blocks_per_logical_kv_block"]),
        **{
            name: (planned["options"][name], told["options"][name])
            for name in planned["options"].keys() & told["options"].keys() - {"model"}
        },
    }  # fmt: skip
    assert len(pairs) > 12
    return [f"{engine.spec.name}: {name}: {one}" for name, one in pairs.items() if one[0] != one[1]]
