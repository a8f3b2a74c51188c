"""Run by ``test_ray``: vLLM's own Ray actors on two raylets, and what kvpatch makes of them.

Prints, as JSON, what each actor says of kvpatch, and what became of an order sent to it, with this
process's variables copied as vLLM's first Ray executor copies them, and with kvpatch's left behind.
"""

from __future__ import annotations

import json
import os
from typing import Any

import ray
from ray.cluster_utils import Cluster

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"


def _actor_class() -> Any:
    from vllm.v1.executor.ray_utils import RayWorkerWrapper

    class Actor(RayWorkerWrapper):  # type: ignore[misc]
        def prepare(self) -> bool:
            """As a worker is prepared, once it has its variables; whether kvpatch is on in it."""
            import importlib

            from vllm.plugins import load_general_plugins

            import kvpatch

            load_general_plugins()
            importlib.import_module(_CONNECTOR)
            return kvpatch.status().enabled

        def take(self, order: Any) -> int:
            """What a worker does with an order at first: unpickle it."""
            return int(order.tokens)

    return Actor


def _play(left_behind: frozenset[str]) -> dict[str, Any]:
    from vllm.ray import ray_env

    from kvpatch.load.read_request import ReadRequest

    ray_env.RAY_NON_CARRY_OVER_ENV_VARS = set(left_behind)
    names = ray_env.get_env_vars_to_copy(exclude_vars={"VLLM_HOST_IP"}, destination="workers")
    copied = {name: os.environ[name] for name in names if name in os.environ}
    remote = ray.remote(num_cpus=0, num_gpus=1)(_actor_class())
    actors = [remote.remote(rpc_rank=rank) for rank in range(2)]
    ray.get([actor.update_environment_variables.remote([copied, copied]) for actor in actors])
    found: dict[str, Any] = {"nodes": len(ray.nodes())}
    found["enabled"] = ray.get([actor.prepare.remote() for actor in actors])
    order = ReadRequest(5, 5, ((1,),), ((2,),), is_guarded=True)
    try:
        found["taken"] = ray.get([actor.take.remote(order) for actor in actors])
    except ray.exceptions.RayError as error:
        found["refused"] = str(error)[-2000:]
    for actor in actors:
        ray.kill(actor)
    return found


def main() -> None:
    """Two raylets; kvpatch is on in this process, by its variable, and not in theirs."""
    enable = os.environ.pop("ENABLE_KVPATCH")
    each = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 128 * 1024**2}
    cluster = Cluster()
    try:
        for address in ("127.0.0.2", "127.0.0.1"):
            cluster.add_node(node_ip_address=address, include_dashboard=False, **each)
        ray.init(address=cluster.address, log_to_driver=False)
        os.environ["ENABLE_KVPATCH"] = enable
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        found = [_play(frozenset()), _play(frozenset({"ENABLE_KVPATCH"}))]
        ray.shutdown()
    finally:
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
