"""Decode engines whose two ranks are Ray actors on two raylets: does kvpatch reach them?

A prefill engine (stock, blocks of 32 tokens) is no part of a cluster. Two decode engines are, each
of one of its own: two raylets on this machine, on loopback. They have blocks of 128 tokens, two
ranks and vLLM's own Ray executor on the CPU (``ray_on_cpu``); kvpatch is on in the processes that
start them, and not in the raylets.

1. One has kvpatch's variables copied to its workers: kvpatch is on in both; tokens and caches are
   identical to those of the prefill engine alone, prompt by prompt, and a spoilt block is noticed.
2. The other has them on vLLM's list of variables that are left behind: its scheduler says so, and
   computes what its workers would read wrongly.

``experiments/ray_cluster.sh`` makes the environment. Exit status 0 when both are as they must be.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from experiments.harness import console_of, importable_in_engines, options_of, work_folder
from kvpatch.tools.verify.compare import compare, sentences
from kvpatch.tools.verify.engine import Engine, EngineSpec, Options, small_engine
from kvpatch.tools.verify.handoff import Request, complete, prefill_then_decode
from kvpatch.tools.verify.model import build_cases, make_tiny_llama
from kvpatch.tools.verify.run import Serving, require_kvpatch_as_asked, running, vocabulary

_HERE = Path(__file__).resolve().parent
_LEFT_BEHIND = "ray_non_carry_over_env_vars.json"
# Few blocks: several engines share a small machine, and fresh memory takes its time.
_PREFILL = ("--block-size", "32", "--num-gpu-blocks-override", "512")
_DECODE = (
    *("--block-size", "128", "--num-gpu-blocks-override", "128"),
    *("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"),
)
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it ends workers of a busy machine
    "RAY_worker_niceness": "0",  # or actors wait for all else on the machine
    # vLLM's CPU workers pin themselves to one core, and a compiler beside them takes minutes.
    "TORCH_COMPILE_DISABLE": "1",
}
_SAYS = "not in all of its workers"


@contextmanager
def cluster() -> Iterator[Any]:
    """Two raylets, each with a device of vLLM's."""
    from ray.cluster_utils import Cluster

    each: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 128 * 1024**2}
    started = Cluster()
    try:
        # vLLM wants an address for each node; its workers take it from their raylet.
        for address in ("127.0.0.2", "127.0.0.1"):
            os.environ["VLLM_HOST_IP"] = address
            started.add_node(node_ip_address=address, include_dashboard=False, **each)
        yield started
    finally:
        started.shutdown()


def decode_engine(
    name: str, model: str, address: str, folder: Path, left_behind: list[str], *, legacy: bool
) -> EngineSpec:
    """A decode engine of a cluster's, whose workers lack the variables that are left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _LEFT_BEHIND).write_text(json.dumps(left_behind))
    environment = {
        "RAY_ADDRESS": address,
        "VLLM_CONFIG_ROOT": str(folder),
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0" if legacy else "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1200",  # of a busy machine
    }
    return small_engine(name, model, "float32", _DECODE, True, True, tuple(environment.items()))


def spread_over_cores() -> None:
    """Undoes what pins the actors to the last core, as kvpatch's engines do with other workers."""
    import psutil

    cores = os.sched_getaffinity(0)
    for process in psutil.Process().children(recursive=True):
        try:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)
        except (OSError, psutil.NoSuchProcess):  # it has ended
            continue


async def served_identically(
    client: httpx.AsyncClient, prefill: Engine, decode: Engine, options: Options, console: Console
) -> bool:
    """True if a pair serves as its prefill engine does alone, with kvpatch in both workers."""
    await require_kvpatch_as_asked(client, (prefill, decode))
    cases = build_cases(await vocabulary(client, prefill))
    pair = await Serving("pair", (prefill,), (decode,), client, options, console).observe(cases)
    (await client.post(f"{prefill.url}/reset_prefix_cache", timeout=60.0)).raise_for_status()
    alone = await Serving("alone", (prefill,), (), client, options, console).observe(cases)
    found = compare(cases, {"alone": alone, "pair": pair})
    for line in sentences(found):
        console.print(line, markup=False)
    return found.passed


async def computed_there(client: httpx.AsyncClient, prefill: Engine, decode: Engine) -> bool:
    """True if a scheduler whose workers lack kvpatch says so, and answers as P does alone."""
    enabled = [found["enabled"] for found in await decode.rpc(client, "kvpatch_process_status")]
    print(f"kvpatch in the workers that it was kept from: {enabled}")
    asked = Request(prefill.spec.model, tuple(range(10, 210)), "left-behind")
    answer = await prefill_then_decode(client, prefill.url, decode.url, asked, 8)
    alone = await complete(client, prefill.url, replace(asked, request_id="left-behind-alone"), 8)
    lines = [line for line in decode.log.read_text().splitlines() if _SAYS in line]
    print(f"answered {answer.token_ids}, alone {alone.token_ids}", *lines[:1])
    return bool(lines) and not any(enabled) and answer.token_ids == alone.token_ids


async def play(work: Path, clusters: tuple[Any, Any], console: Console, *, legacy: bool) -> bool:
    """Both decode engines beside one prefill engine."""
    model = str(make_tiny_llama(work / "model"))
    options = Options(work_dir=work, max_tokens=8, startup_timeout=900.0)
    (first, second), kept = clusters, ["ENABLE_KVPATCH"]
    specs = (
        small_engine("prefill", model, "float32", _PREFILL, True, False),
        decode_engine("copied", model, first.address, work / "copied.d", [], legacy=legacy),
        decode_engine("left-behind", model, second.address, work / "left.d", kept, legacy=legacy),
    )
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        running(specs, client, options, console) as (prefill, copied, left_behind),
    ):
        spread_over_cores()
        passed = {
            "identical": await served_identically(client, prefill, copied, options, console),
            "computed": await computed_there(client, prefill, left_behind),
        }
    for name, is_so in passed.items():
        print(f"{name}: {'as it must be' if is_so else 'NOT as it must be'}")
    return all(passed.values())


def main() -> int:
    """Returns 0 when both are as they must be, 2 where Ray is not installed."""
    options = options_of(
        __doc__,
        judged=False,
        work_dir=(None, "for logs and the model; kept"),
        legacy=(
            False,
            "vLLM's first Ray executor, which copies the variables that it knows, and kvpatch's by "
            "kvpatch; its second one, the default of 0.32, copies all",
        ),
    )
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed here: run experiments/ray_cluster.sh")
        return 2
    console = console_of(160)
    work = work_folder(options.work_dir, "ray", console)
    # Before the raylets start: their workers import the platform too, and have no kvpatch yet.
    importable_in_engines(_HERE / "ray_on_cpu")
    os.environ.pop("ENABLE_KVPATCH", None)
    os.environ.update(_ENVIRONMENT)
    with cluster() as first, cluster() as second:
        return 0 if asyncio.run(play(work, (first, second), console, legacy=options.legacy)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
