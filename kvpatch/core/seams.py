"""Where vLLM is wrapped: the connector's seams as sites, per release."""

from __future__ import annotations

from kvpatch.core.ledger import Kind, Site
from kvpatch.core.releases import Place, ReleaseFacts

_CORE = Place("vllm.v1.core.sched.scheduler", "Scheduler")


def _site(place: Place, name: str, *parameters: str, kind: Kind = "function") -> Site:
    bound = {"function": ("self",), "classmethod": ("cls",), "staticmethod": ()}[kind]
    return Site(place.module, place.owner, name, kind, (*bound, *parameters))


def _front_end(module: str, owner: str, name: str, *parameters: str) -> Site:
    return Site(module, owner, name, "function", ("self", *parameters), is_front_end=True)


# --- the workers ---------------------------------------------------------------


def worker_init(facts: ReleaseFacts) -> Site:
    """Where a worker asks whether its device's memory can be registered."""
    return _site(facts.worker, "__init__", *_init_parameters(facts))


def register_kv_caches(facts: ReleaseFacts) -> Site:
    """Where a worker is handed the tensors of its KV cache."""
    return _site(facts.worker, "register_kv_caches", "kv_caches")


def nixl_handshake(facts: ReleaseFacts) -> Site:
    """Where a worker asks a peer for its metadata."""
    asked = ("host", "port", "remote_tp_size", "expected_engine_id")
    contexts = ("remote_dcp_size",) if facts.states_context_parallelism else ()
    has_stages = facts.question == "stage and rank"
    stages = ("remote_pp_size", "notif_agents_only") if has_stages else ()
    return _site(facts.worker, "_nixl_handshake", *asked, *contexts, *stages)


def add_remote_agent(facts: ReleaseFacts) -> Site:
    """Where a worker is told of one rank of a peer, at the handshake."""
    contexts = ("remote_dcp_size",) if facts.states_context_parallelism else ()
    told = ("nixl_agent_meta", "remote_tp_rank", "remote_tp_size", *contexts)
    return _site(facts.worker, "add_remote_agent", *told)


def start_load_kv(facts: ReleaseFacts) -> Site:
    """Where a worker is told what to read in a step."""
    return _site(facts.reader, "start_load_kv", "metadata")


def read_blocks_for_req(facts: ReleaseFacts) -> Site:
    """Where a worker posts the reads of one request."""
    return _site(facts.reader, "_read_blocks_for_req", "req_id", "meta")


def pop_done_transfers(facts: ReleaseFacts) -> Site:
    """Where a worker asks NIXL which transfers are done."""
    return _site(facts.worker, "_pop_done_transfers", "transfers")


def handle_failed_transfer(facts: ReleaseFacts) -> Site:
    """Where a worker books a load that failed; these parameters in releases <= 0.29."""
    return _site(facts.worker, "_handle_failed_transfer", "req_id", "handle")


def worker_get_finished(facts: ReleaseFacts) -> Site:
    """Where a worker says which requests have been sent and received."""
    return _site(facts.worker, "get_finished")


def unregister_kv_caches(facts: ReleaseFacts) -> Site:
    """Where a worker lets go of its caches, whose contents are about to be lost; from 0.33."""
    return _site(facts.worker, "unregister_kv_caches")


def transfer_results(facts: ReleaseFacts) -> Site:
    """As :func:`worker_get_finished`, where the release first knows it."""
    name = "get_transfer_results" if facts.failed_loads == "as failed" else "get_finished"
    return _site(facts.worker, name)


def reorder_received(facts: ReleaseFacts) -> Site:
    """Where a worker on a CPU reorders a load of another backend's blocks; from 0.20."""
    name = "post_process_device_kv_on_receive_heterogeneous_attn"
    return _site(facts.worker, name, "block_ids")


def worker_stats(facts: ReleaseFacts) -> Site:
    """Where a worker tells what it has counted since the last step."""
    return _site(facts.worker, "get_kv_connector_stats")


# --- the connector's scheduler half ----------------------------------------------


def scheduler_init(facts: ReleaseFacts) -> Site:
    """Where the connector's scheduler half is made."""
    return _site(facts.scheduler, "__init__", *_init_parameters(facts))


def _init_parameters(facts: ReleaseFacts) -> tuple[str, ...]:
    plan = ("kv_cache_config",) if facts.has_cache_groups else ()
    return ("vllm_config", "engine_id", *plan)


def build_connector_meta(facts: ReleaseFacts) -> Site:
    """Where the scheduler writes what the workers will read, in pull and in push mode."""
    return _site(facts.scheduler, "build_connector_meta", "scheduler_output")


def scheduler_matched_tokens(facts: ReleaseFacts) -> Site:
    """Where the connector's scheduler half says how many tokens would be loaded."""
    asked = ("request", "num_computed_tokens")
    return _site(facts.scheduler, "get_num_new_matched_tokens", *asked)


def get_handshake_metadata(facts: ReleaseFacts) -> Site:
    """Where vLLM asks a worker what it states at handshakes, for its scheduler; from 0.11.1."""
    return _site(facts.connector, "get_handshake_metadata")


def set_xfer_handshake_metadata(facts: ReleaseFacts) -> Site:
    """Where the connector's scheduler half is handed what its workers state; from 0.11.1."""
    return _site(facts.scheduler, "set_xfer_handshake_metadata", "metadata")


def handshake_listener(facts: ReleaseFacts) -> Site:
    """The thread that answers handshakes."""
    if not facts.listens_in_scheduler:
        place, parameters = facts.worker, ("metadata", "ready_event", "base_port", "tp_rank")
    else:
        host = ("host",) if facts.listens_by_host else ()
        place = facts.scheduler
        parameters = ("encoded_data", "ready_event", "stop_event", *host, "port")
    return _site(place, "_nixl_handshake_listener", *parameters, kind="staticmethod")


# --- the connector -------------------------------------------------------------


def get_required_kvcache_layout(facts: ReleaseFacts) -> Site:
    """Where vLLM asks the connector which layout the cache must have; from 0.10.1."""
    name = "get_required_kvcache_layout"
    return _site(facts.connector, name, "vllm_config", kind="classmethod")


def bind_connector_metadata(facts: ReleaseFacts) -> Site:
    """Where a worker is handed a step's metadata, before the model runs; every connector's.

    ``start_load_kv`` comes after the model has run, from 0.29.
    """
    place = Place(f"{facts.connector.module.partition('.v1.')[0]}.v1.base", "KVConnectorBase_V1")
    return _site(place, "bind_connector_metadata", "connector_metadata")


def get_num_new_matched_tokens(facts: ReleaseFacts) -> Site:
    """Where vLLM asks, of a request that it could schedule, what will be loaded."""
    asked = ("request", "num_computed_tokens")
    return _site(facts.connector, "get_num_new_matched_tokens", *asked)


def update_state_after_alloc(facts: ReleaseFacts) -> Site:
    """Where vLLM says that a request has got its blocks."""
    got = ("request", "blocks", "num_external_tokens")
    return _site(facts.connector, "update_state_after_alloc", *got)


def connector_meta(facts: ReleaseFacts) -> Site:
    """Where vLLM asks for a step's metadata, whichever scheduler half writes it."""
    return _site(facts.connector, "build_connector_meta", "scheduler_output")


def get_finished(facts: ReleaseFacts) -> Site:
    """Where vLLM asks which requests have been sent and received."""
    return _site(facts.connector, "get_finished", "finished_req_ids")


def get_block_ids_with_load_errors(facts: ReleaseFacts) -> Site:
    """Where vLLM asks which blocks could not be loaded; from 0.11.1."""
    return _site(facts.connector, "get_block_ids_with_load_errors")


def request_finished(facts: ReleaseFacts) -> tuple[Site, ...]:
    """Where vLLM says that a request is over, and gets what P's answer carries."""
    groups = ("request_finished_all_groups",) if facts.has_cache_groups else ()
    names = ("request_finished", *groups)
    return tuple(_site(facts.connector, name, "request", "block_ids") for name in names)


def wait_for_save(facts: ReleaseFacts) -> Site:
    """What vLLM calls in a worker once the model has run."""
    return _site(facts.connector, "wait_for_save")


def set_host_xfer_buffer_ops(facts: ReleaseFacts) -> Site:
    """Where a platform's runner hands over its copies for the release's own buffer."""
    return _site(facts.connector, "set_host_xfer_buffer_ops", "copy_operation")


def connector_stats(facts: ReleaseFacts) -> Site:
    """Where vLLM asks for what was counted, in workers and (from 0.24) in the scheduler."""
    return _site(facts.connector, "get_kv_connector_stats")


def build_connector_stats(facts: ReleaseFacts) -> Site:
    """Where the front end makes of what an engine sent what it logs."""
    return _site(facts.connector, "build_kv_connector_stats", "data", kind="classmethod")


# --- the connector's statistics, from 0.11.1 --------------------------------------


def record_transfer(stats: Place) -> Site:
    """Where a transfer that is done is counted."""
    return _site(stats, "record_transfer", "res")


def stats_are_empty(stats: Place) -> Site:
    """Whether there is nothing to tell."""
    return _site(stats, "is_empty")


def aggregate_stats(stats: Place) -> Site:
    """Where what several workers tell becomes one."""
    return _site(stats, "aggregate", "other")


def prom_metrics_init(stats: Place) -> Site:
    """Where the front end makes the connector's metrics."""
    made_of = ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues")
    return _site(Place(stats.module, "NixlPromMetrics"), "__init__", *made_of)


def prom_metrics_observe(stats: Place) -> Site:
    """Where the front end counts what an engine sent."""
    owner = Place(stats.module, "NixlPromMetrics")
    return _site(owner, "observe", "transfer_stats_data", "engine_idx")


# --- vLLM's scheduler ------------------------------------------------------------


def schedule(facts: ReleaseFacts) -> Site:
    """A step of vLLM's scheduler."""
    return _site(_CORE, "schedule", *(("throttle_prefills",) if facts.throttles_prefills else ()))


def add_request(facts: ReleaseFacts) -> Site:
    """Where vLLM's scheduler takes a request."""
    return _site(_CORE, "add_request", "request")


def finish_requests(facts: ReleaseFacts) -> Site:
    """Where vLLM's scheduler ends requests from outside: aborts, and failed loads."""
    return _site(_CORE, "finish_requests", "request_ids", "finished_status")


def connector_finished(facts: ReleaseFacts) -> Site:
    """Where vLLM's scheduler asks whether a request that is over keeps its blocks."""
    return _site(_CORE, "_connector_finished", "request")


def update_from_kv_xfer_finished(facts: ReleaseFacts) -> Site:
    """Where vLLM's scheduler hears what its workers have sent and received."""
    return _site(_CORE, "_update_from_kv_xfer_finished", facts.core_output)


def update_from_output(_: ReleaseFacts) -> Site:
    """Where vLLM's scheduler hears what a step has come to."""
    return _site(_CORE, "update_from_output", "scheduler_output", "model_runner_output")


def update_requests_with_invalid_blocks(facts: ReleaseFacts) -> Site:
    """Where vLLM's scheduler finds the requests whose blocks could not be loaded; from 0.13."""
    tokens = ("num_scheduled_tokens",) if facts.counts_tokens_of_failed else ()
    taken = ("requests", "invalid_block_ids", *tokens, "evict_blocks")
    return _site(_CORE, "_update_requests_with_invalid_blocks", *taken)


def free_blocks(facts: ReleaseFacts) -> Site:
    """Where a request's blocks are let go of: read, finished, aborted or preempted."""
    return _site(Place("vllm.v1.core.kv_cache_manager", "KVCacheManager"), "free", "request")


# --- the API server --------------------------------------------------------------

_CLIENT = "vllm.v1.engine.async_llm"
_PARENT = "vllm.v1.engine.parallel_sampling"


def server_add_request(facts: ReleaseFacts) -> Site:
    """Where the API server's engine client takes a request."""
    return _front_end(_CLIENT, "AsyncLLM", "add_request", *facts.server_request[1:])


def child_sampling(facts: ReleaseFacts) -> Site:
    """Where the front end makes the requests for several answers (``n``) to one prompt."""
    return _front_end(_PARENT, "ParentRequest", "get_child_info", "index")


def create_completion(facts: ReleaseFacts) -> Site:
    """Where the API server takes a request to ``/v1/completions``."""
    owner = "OpenAIServingCompletion"
    taken = ("request", "raw_request")
    return _front_end(facts.completions_module, owner, "create_completion", *taken)


def front_end_modules(facts: ReleaseFacts) -> tuple[str, ...]:
    """The modules of the API server that a patch wraps, which need not import the connector."""
    return (_CLIENT, _PARENT, facts.completions_module)
