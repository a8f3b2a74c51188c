"""A decode engine whose two ranks are Ray actors on two raylets: does kvpatch reach them?

Two raylets are started on this machine, on loopback. The prefill engine (stock, blocks of 32
tokens) is no part of the cluster; the decode engine has blocks of 128, two ranks and vLLM's own Ray
executor on the CPU (``ray_on_cpu``), and kvpatch is on in the process that starts it, not in the
raylets.

1. ``kvpatch verify``: tokens and caches identical to a single engine's, kvpatch on in both workers.
2. The same with kvpatch's variables on vLLM's list of those that are left behind: a worker that is
   handed an order says so and ends the engine, before a byte moves.

``experiments/ray_cluster.sh`` makes the environment. Exit status 0 when both are as they must be.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_LEFT_BEHIND = "ray_non_carry_over_env_vars.json"
_DECODE = "--block-size 128 --tensor-parallel-size 2 --distributed-executor-backend ray"
_PREFILL = "--block-size 32"
_SAYS = "NotPatchedHere"


@contextmanager
def cluster() -> Iterator[str]:
    """Two raylets, each with a device of vLLM's; its address."""
    from ray.cluster_utils import Cluster

    each = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 128 * 1024**2}
    started = Cluster()
    try:
        # vLLM wants an address for each node; its workers take it from their raylet.
        for address in ("127.0.0.2", "127.0.0.1"):
            os.environ["VLLM_HOST_IP"] = address
            started.add_node(node_ip_address=address, include_dashboard=False, **each)
        yield str(started.address)
    finally:
        started.shutdown()


def served_identically(work: Path, environment: dict[str, str]) -> bool:
    """Whether the pair serves as a single engine does, with kvpatch in both workers."""
    command = [sys.executable, "-m", "kvpatch.cli", "verify", "--work-dir", str(work)]
    command += ["--setups", "single,kvpatch", "--kvpatch-on", "decode"]
    command += ["--p-args", _PREFILL, "--d-args", _DECODE]
    return subprocess.run(command, env=os.environ | environment, check=False).returncode == 0


async def refused_loudly(work: Path, environment: dict[str, str]) -> bool:
    """Whether a worker without kvpatch ends the decode engine at the first order, and says why."""
    import httpx

    from kvpatch.core.errors import RequestFailed
    from kvpatch.verify.engine import Engine, stop_all
    from kvpatch.verify.handoff import prefill_then_decode
    from kvpatch.verify.model import make_tiny_llama
    from kvpatch.verify.setups import small_engine

    os.environ.update(environment)
    model = str(make_tiny_llama(work / "model"))
    specs = [
        small_engine(name, model, "float32", tuple(arguments.split()), True, on)
        for name, arguments, on in (("prefill", _PREFILL, False), ("decode", _DECODE, True))
    ]
    engines = [Engine(spec, work / f"{spec.name}.log") for spec in specs]
    try:
        for engine in engines:
            engine.start()
        async with httpx.AsyncClient() as client:
            await asyncio.gather(*(engine.ready(client, 900.0) for engine in engines))
            urls = [engine.url for engine in engines]
            prompt = tuple(range(10, 210))
            try:
                answer = await prefill_then_decode(client, *urls, model, prompt, 8, "left-behind")
            except (RequestFailed, httpx.HTTPError) as error:
                print(f"the request failed: {error}")
            else:
                print(f"the request was served: {answer.token_ids}")
                return False
            await asyncio.sleep(5)  # the engine writes down why
    finally:
        stop_all(engines)
    said = _SAYS in engines[1].log.read_text(errors="replace")
    print(f"decode's log {'names' if said else 'does not name'} {_SAYS}")
    return said


def main() -> int:
    """Returns 0 when both runs are as they must be, 2 where Ray is not installed."""
    options = argparse.ArgumentParser(
        prog="ray_cluster.sh", description=(__doc__ or "").splitlines()[0]
    )
    options.add_argument("--work-dir", type=Path)
    options.add_argument("--only", choices=("identical", "refused"))
    options.add_argument(
        "--legacy",
        action="store_true",
        help="vLLM's first Ray executor, which copies the variables that it knows, and kvpatch's "
        "by kvpatch; its second one, the default of 0.32, copies all",
    )
    chosen = options.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed here: run experiments/ray_cluster.sh")
        return 2
    work = chosen.work_dir or Path(tempfile.mkdtemp(prefix="ray-cluster-"))
    paths = [str(_HERE / "ray_on_cpu"), os.environ.get("PYTHONPATH", "")]
    # Before the raylets start: their workers import the platform too, and have no kvpatch yet.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # vLLM's CPU workers pin themselves to one core, and a compiler beside them takes minutes.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    passed = []
    for name in ("identical", "refused"):
        if chosen.only not in (None, name):
            continue
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        left = ["ENABLE_KVPATCH"] if name == "refused" else []
        (folder / _LEFT_BEHIND).write_text(json.dumps(left))
        with cluster() as address:
            environment = {
                "RAY_ADDRESS": address,
                "VLLM_CONFIG_ROOT": str(folder),
                "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0" if chosen.legacy else "1",
                "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1200",  # of a busy machine
            }
            if name == "identical":
                passed.append(served_identically(folder, environment))
            else:
                passed.append(asyncio.run(refused_loudly(folder, environment)))
        print(f"{name}: {'as it must be' if passed[-1] else 'NOT as it must be'}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
