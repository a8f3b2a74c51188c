"""The connector's seams as sites, per generation."""

from __future__ import annotations

from kvpatch._patching import Site
from kvpatch._versions import Generation


def register_kv_caches(generation: Generation) -> Site:
    """Where a worker is handed the tensors of its KV cache."""
    return Site(
        module=generation.worker_module,
        owner=generation.worker_class,
        name="register_kv_caches",
        kind="function",
        parameters=("self", "kv_caches"),
    )


def get_required_kvcache_layout(generation: Generation) -> Site:
    """Where vLLM asks the connector which layout the cache must have; from 0.10.1."""
    return Site(
        module=generation.connector_module,
        owner=generation.connector_class,
        name="get_required_kvcache_layout",
        kind="classmethod",
        parameters=("cls", "vllm_config"),
    )


def add_remote_agent(generation: Generation) -> Site:
    """Where a worker is told of one rank of a peer, at the handshake."""
    contexts = ("remote_dcp_size",) if generation.slug in ("g0290", "g0300") else ()
    return Site(
        module=generation.worker_module,
        owner=generation.worker_class,
        name="add_remote_agent",
        kind="function",
        parameters=("self", "nixl_agent_meta", "remote_tp_rank", "remote_tp_size", *contexts),
    )


def read_blocks_for_req(generation: Generation) -> Site:
    """Where a worker posts the reads of one request."""
    return Site(
        module=generation.reader_module,
        owner=generation.reader_class,
        name="_read_blocks_for_req",
        kind="function",
        parameters=("self", "req_id", "meta"),
    )


def build_connector_meta(generation: Generation) -> Site:
    """Where the scheduler writes what the workers will read."""
    return Site(
        module=generation.scheduler_module,
        owner=generation.scheduler_class,
        name="build_connector_meta",
        kind="function",
        parameters=("self", "scheduler_output"),
    )


def handle_failed_transfer(generation: Generation) -> Site:
    """Where a worker books a load that failed, from 0.18 to 0.29."""
    return Site(
        module=generation.worker_module,
        owner=generation.worker_class,
        name="_handle_failed_transfer",
        kind="function",
        parameters=("self", "req_id", "handle"),
    )


def get_finished(generation: Generation) -> Site:
    """Where vLLM asks which requests have been sent and received."""
    return Site(
        module=generation.connector_module,
        owner=generation.connector_class,
        name="get_finished",
        kind="function",
        parameters=("self", "finished_req_ids"),
    )


def worker_get_finished(generation: Generation) -> Site:
    """Where a worker says which requests have been sent and received."""
    return Site(
        module=generation.worker_module,
        owner=generation.worker_class,
        name="get_finished",
        kind="function",
        parameters=("self",),
    )


def pop_done_transfers(generation: Generation) -> Site:
    """Where a worker asks NIXL which transfers are done."""
    return Site(
        module=generation.worker_module,
        owner=generation.worker_class,
        name="_pop_done_transfers",
        kind="function",
        parameters=("self", "transfers"),
    )
