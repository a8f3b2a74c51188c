"""Writes down what real engines answer to ``kvpatch plan``: one as in production, one in dev mode.

    python -m tests.planning.record_answers

in an environment with vLLM. P is a stock engine with blocks of 128 tokens; D has kvpatch, blocks
of 32, and VLLM_SERVER_DEV_MODE. What no plan reads is left out of what they answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvpatch.tools.planning.answers import CACHE_INFO, CONFIGURED, MODELS, SERVER_INFO, VERSION

FILE = Path(__file__).with_name("answers.json")
METRICS = "/metrics"
PATHS = (VERSION, MODELS, METRICS, SERVER_INFO)
MODEL = "tiny-llama"

_KEPT_METRICS = (CACHE_INFO, "vllm:nixl_num_failed", "vllm:num_requests", "kvpatch_loads")
_KEPT_PARTS = (
    *sorted({path[0] for path in CONFIGURED.values()}),
    *("cache_config", "device_config", "attention_config"),
    *("speculative_config", "kv_transfer_config"),
)
_KEPT_VARIABLES = ("NIXL", "PLUGINS", "LAYOUT", "ATTENTION", "TARGET_DEVICE")
_KEPT_MACHINE = ("cuda_compiled_version", "hip_compiled_version", "torch_version", "cpu_info")


def shortened(path: str, text: str) -> str:
    """An answer without what no plan reads."""
    if path == METRICS:
        lines = [line for line in text.splitlines() if line.startswith(_KEPT_METRICS)]
        return "\n".join([*lines, ""])
    if path == SERVER_INFO and text.startswith('{"vllm_config"'):
        content = json.loads(text)
        whole, machine = content["vllm_config"], content["system_env"]
        variables = content["vllm_env"]
        kept = {
            "vllm_config": {part: whole[part] for part in _KEPT_PARTS if part in whole},
            "vllm_env": {
                name: value
                for name, value in variables.items()
                if any(word in name for word in _KEPT_VARIABLES)
            },
            "system_env": {name: machine[name] for name in _KEPT_MACHINE},
        }
        flags = [line for line in machine["cpu_info"].splitlines() if line.startswith("Flags")]
        kept["system_env"]["cpu_info"] = "\n".join(flags)
        return json.dumps(kept)
    return text


async def recorded(folder: Path) -> dict[str, Any]:
    """What both engines answer, by side and path: status and text."""
    import httpx

    from kvpatch.core.installed import installed_vllm
    from kvpatch.tools.verify.engine import Engine, stop_all
    from kvpatch.tools.verify.model import make_tiny_llama
    from kvpatch.tools.verify.setups import small_engine

    model = str(make_tiny_llama(folder / MODEL))
    engines = [
        Engine(
            small_engine(
                name,
                model,
                "float32",
                ("--block-size", str(block_tokens)),
                connector=True,
                kvpatch=kvpatch,
                environment=(("VLLM_SERVER_DEV_MODE", dev_mode),),
            ),
            folder / f"{name}.log",
        )
        for name, block_tokens, kvpatch, dev_mode in (("P", 128, False, "0"), ("D", 32, True, "1"))
    ]
    found: dict[str, Any] = {"release": installed_vllm().version}
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            for engine in engines:
                engine.start()
            for engine in engines:
                await engine.ready(client, 900)
            for engine in engines:
                found[engine.spec.name] = {}
                for path in PATHS:
                    answer = await client.get(f"{engine.url}{path}", timeout=120)
                    text = shortened(path, answer.text).replace(model, MODEL)
                    found[engine.spec.name][path] = [answer.status_code, text]
    finally:
        stop_all(engines)
    return found


def main() -> None:
    """Starts both, asks them, and writes the file."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(recorded(Path(folder)))
    found = {"made_by": "python -m tests.planning.record_answers", **found}
    FILE.write_text(f"{json.dumps(found, indent=1)}\n")
    print(f"wrote {FILE}", file=sys.stderr)


if __name__ == "__main__":
    main()
