"""The seams, where vLLM is wrapped: each one, called with a release's facts, is a site.

A seam has its place, its name there and its parameters, without ``self`` and ``cls``. Where a
release decides a parameter, a function of its facts stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from kvpatch.core.ledger import Kind, Site
from kvpatch.core.releases import Place, ReleaseFacts

Seam = Callable[[ReleaseFacts], Site]
_PlaceOf = Callable[[ReleaseFacts], Place]
#: A parameter, or those that a release has.
_Named = str | Callable[[ReleaseFacts], tuple[str, ...]]

_BOUND: dict[Kind, tuple[str, ...]] = {"function": ("self",), "classmethod": ("cls",)}

_WORKER: _PlaceOf = attrgetter("worker")
_READER: _PlaceOf = attrgetter("reader")
_SCHEDULER: _PlaceOf = attrgetter("scheduler")
_CONNECTOR: _PlaceOf = attrgetter("connector")


def _at(
    place: Place | _PlaceOf,
    name: str,
    *parameters: _Named,
    kind: Kind = "function",
    front_end: bool = False,
) -> Seam:
    def site(facts: ReleaseFacts) -> Site:
        found = place if isinstance(place, Place) else place(facts)
        named = [(one,) if isinstance(one, str) else one(facts) for one in parameters]
        taken = (*_BOUND.get(kind, ()), *(one for some in named for one in some))
        return Site(found.module, found.owner, name, kind, taken, front_end)

    return site


def _if(fact: str, *parameters: str) -> Callable[[ReleaseFacts], tuple[str, ...]]:
    """Names parameters of the releases of which a fact is true."""
    return lambda facts: parameters if getattr(facts, fact) else ()


_INIT = ("vllm_config", "engine_id", _if("has_cache_groups", "kv_cache_config"))
_CONTEXTS = _if("states_context_parallelism", "remote_dcp_size")


def _stages(facts: ReleaseFacts) -> tuple[str, ...]:
    has_stages = facts.question == "stage and rank"
    return ("remote_pp_size", "notif_agents_only") if has_stages else ()


# --- the workers ---------------------------------------------------------------

#: Where a worker asks whether its device's memory can be registered.
worker_init = _at(_WORKER, "__init__", *_INIT)
#: Where a worker is handed the tensors of its KV cache.
register_kv_caches = _at(_WORKER, "register_kv_caches", "kv_caches")
#: Where a worker asks a peer for its metadata.
nixl_handshake = _at(
    *(_WORKER, "_nixl_handshake", "host", "port", "remote_tp_size", "expected_engine_id"),
    *(_CONTEXTS, _stages),
)
#: Where a worker is told of one rank of a peer, at the handshake.
add_remote_agent = _at(
    *(_WORKER, "add_remote_agent", "nixl_agent_meta", "remote_tp_rank", "remote_tp_size"), _CONTEXTS
)
#: Where a worker is told what to read in a step.
start_load_kv = _at(_READER, "start_load_kv", "metadata")
#: Where a worker posts the reads of one request.
read_blocks_for_req = _at(_READER, "_read_blocks_for_req", "req_id", "meta")
#: Where a worker asks NIXL which transfers are done.
pop_done_transfers = _at(_WORKER, "_pop_done_transfers", "transfers")
#: Where a worker books a load that failed; these parameters in releases <= 0.29.
handle_failed_transfer = _at(_WORKER, "_handle_failed_transfer", "req_id", "handle")
#: Where a worker says which requests have been sent and received.
worker_get_finished = _at(_WORKER, "get_finished")
#: Where a worker lets go of its caches, whose contents are about to be lost; from 0.33.
unregister_kv_caches = _at(_WORKER, "unregister_kv_caches")
#: Where a worker on a CPU reorders a load of another backend's blocks; from 0.20.
reorder_received = _at(_WORKER, "post_process_device_kv_on_receive_heterogeneous_attn", "block_ids")
#: Where a worker tells what it has counted since the last step.
worker_stats = _at(_WORKER, "get_kv_connector_stats")
_transfer_results = _at(_WORKER, "get_transfer_results")


def transfer_results(facts: ReleaseFacts) -> Site:
    """Returns the site where a worker reports sent and received requests, on this release."""
    return (_transfer_results if facts.failed_loads == "as failed" else worker_get_finished)(facts)


# --- the connector's scheduler half ----------------------------------------------

_ASKED = ("request", "num_computed_tokens")

#: Where the connector's scheduler half is made.
scheduler_init = _at(_SCHEDULER, "__init__", *_INIT)
#: Where the scheduler writes what the workers will read, in pull and in push mode.
build_connector_meta = _at(_SCHEDULER, "build_connector_meta", "scheduler_output")
#: Where the connector's scheduler half says how many tokens would be loaded.
scheduler_matched_tokens = _at(_SCHEDULER, "get_num_new_matched_tokens", *_ASKED)
#: Where the connector's scheduler half is handed what its workers state; from 0.11.1.
set_xfer_handshake_metadata = _at(_SCHEDULER, "set_xfer_handshake_metadata", "metadata")

_in_worker = _at(
    *(_WORKER, "_nixl_handshake_listener", "metadata", "ready_event", "base_port", "tp_rank"),
    kind="staticmethod",
)
_in_scheduler = _at(
    *(_SCHEDULER, "_nixl_handshake_listener", "encoded_data", "ready_event", "stop_event"),
    *(_if("listens_by_host", "host"), "port"),
    kind="staticmethod",
)


def handshake_listener(facts: ReleaseFacts) -> Site:
    """The thread that answers handshakes."""
    return (_in_scheduler if facts.listens_in_scheduler else _in_worker)(facts)


def side_channel_sockets(facts: ReleaseFacts) -> tuple[Site, ...]:
    """Returns the sites that make the side channel's sockets, in workers and in the scheduler."""
    modules = dict.fromkeys((facts.worker.module, facts.scheduler.module))
    return tuple(
        Site(module, "", "zmq_ctx", "function", ("socket_type", "addr")) for module in modules
    )


# --- the connector -------------------------------------------------------------

#: Where vLLM asks a worker what it states at handshakes, for its scheduler; from 0.11.1.
get_handshake_metadata = _at(_CONNECTOR, "get_handshake_metadata")
#: Where vLLM asks the connector which layout the cache must have; from 0.10.1.
get_required_kvcache_layout = _at(
    _CONNECTOR, "get_required_kvcache_layout", "vllm_config", kind="classmethod"
)
#: Where vLLM asks, of a request that it could schedule, what will be loaded.
get_num_new_matched_tokens = _at(_CONNECTOR, "get_num_new_matched_tokens", *_ASKED)
#: Where vLLM says that a request has got its blocks.
update_state_after_alloc = _at(
    _CONNECTOR, "update_state_after_alloc", "request", "blocks", "num_external_tokens"
)
#: Where vLLM asks which requests have been sent and received.
get_finished = _at(_CONNECTOR, "get_finished", "finished_req_ids")
#: Where vLLM asks which blocks could not be loaded; from 0.11.1.
get_block_ids_with_load_errors = _at(_CONNECTOR, "get_block_ids_with_load_errors")
#: What vLLM calls in a worker once the model has run.
wait_for_save = _at(_CONNECTOR, "wait_for_save")
#: Where a platform's runner hands over its copies for the release's own buffer.
set_host_xfer_buffer_ops = _at(_CONNECTOR, "set_host_xfer_buffer_ops", "copy_operation")
#: Where vLLM asks for what was counted, in workers and (from 0.24) in the scheduler.
connector_stats = _at(_CONNECTOR, "get_kv_connector_stats")
#: Where the front end makes of what an engine sent what it logs.
build_connector_stats = _at(_CONNECTOR, "build_kv_connector_stats", "data", kind="classmethod")


def _base(facts: ReleaseFacts) -> Place:
    return Place(f"{facts.connector.module.partition('.v1.')[0]}.v1.base", "KVConnectorBase_V1")


#: Where a worker gets a step's metadata, before the model runs; every connector's.
#: ``start_load_kv`` comes after the model has run, from 0.29. A MultiConnector of a release
#: <= 0.11.0 does not call it.
bind_connector_metadata = _at(_base, "bind_connector_metadata", "connector_metadata")

_finished = _at(_CONNECTOR, "request_finished", "request", "block_ids")
_all_finished = _at(_CONNECTOR, "request_finished_all_groups", "request", "block_ids")


def request_finished(facts: ReleaseFacts) -> tuple[Site, ...]:
    """The place where vLLM says that a request is over, and gets what P's answer carries."""
    seams = (_finished, _all_finished) if facts.has_cache_groups else (_finished,)
    return tuple(seam(facts) for seam in seams)


# --- the connector's statistics, from 0.11.1 --------------------------------------

_STATS: _PlaceOf = attrgetter("stats")


def _metrics(facts: ReleaseFacts) -> Place:
    return Place(_STATS(facts).module, "NixlPromMetrics")


#: Where a transfer that is done is counted.
record_transfer = _at(_STATS, "record_transfer", "res")
#: Where the release asks whether there is nothing to tell.
stats_are_empty = _at(_STATS, "is_empty")
#: Where what several workers tell becomes one.
aggregate_stats = _at(_STATS, "aggregate", "other")
#: Where the front end makes the connector's metrics.
prom_metrics_init = _at(
    *(_metrics, "__init__", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues")
)
#: Where the front end counts what an engine sent.
prom_metrics_observe = _at(_metrics, "observe", "transfer_stats_data", "engine_idx")


# --- vLLM's scheduler ------------------------------------------------------------

_CORE = Place("vllm.v1.core.sched.scheduler", "Scheduler")
_MANAGER = Place("vllm.v1.core.kv_cache_manager", "KVCacheManager")
_COORDINATORS = "vllm.v1.core.kv_cache_coordinator"

#: Where vLLM's scheduler takes a request.
add_request = _at(_CORE, "add_request", "request")
#: Where vLLM's scheduler ends requests from outside: aborts, and failed loads.
finish_requests = _at(_CORE, "finish_requests", "request_ids", "finished_status")
#: Where vLLM's scheduler asks whether a request that is over keeps its blocks.
connector_finished = _at(_CORE, "_connector_finished", "request")
#: Where vLLM's scheduler hears what a step has come to.
update_from_output = _at(_CORE, "update_from_output", "scheduler_output", "model_runner_output")
#: Where vLLM's scheduler fails requests that its workers report as failed (from 0.30).
handle_failed_recving = _at(_CORE, "_handle_failed_recving", "failed_req_ids")
#: A step of vLLM's scheduler.
schedule = _at(_CORE, "schedule", _if("throttles_prefills", "throttle_prefills"))
#: Where vLLM's scheduler hears what its workers have sent and received.
update_from_kv_xfer_finished = _at(
    _CORE, "_update_from_kv_xfer_finished", lambda facts: (facts.core_output,)
)
#: Where vLLM's scheduler finds requests whose blocks were not loaded; from 0.13.
update_requests_with_invalid_blocks = _at(
    *(_CORE, "_update_requests_with_invalid_blocks", "requests", "invalid_block_ids"),
    *(_if("counts_tokens_of_failed", "num_scheduled_tokens"), "evict_blocks"),
)
#: Where vLLM's scheduler caches the blocks of a load that has come.
update_waiting_for_remote_kv = _at(_CORE, "_update_waiting_for_remote_kv", "request")
#: Where a new request gets its prefix hit, and blocks for what it loads; from 0.14.
allocate_new_computed_blocks = _at(
    *(Place(_COORDINATORS, "KVCacheCoordinator"), "allocate_new_computed_blocks"),
    *("request_id", "new_computed_blocks"),
    *("num_local_computed_tokens", "num_external_computed_tokens"),
)
#: Where vLLM's scheduler looks each cache group up in its prefix cache, alone (0.24 to 0.26).
longest_hit_of_each_group = _at(
    Place(_COORDINATORS, "HybridKVCacheCoordinator"),
    *("find_longest_cache_hit_per_group", "block_hashes", "max_cache_hit_length"),
)
#: Where a request that is over lets go of blocks in front of its window, before P names the rest.
remove_skipped_blocks = _at(
    _MANAGER, "remove_skipped_blocks", "request_id", lambda facts: facts.window_end
)
_free = _at(_MANAGER, "free", "request")
_pop_blocks = _at(_MANAGER, "pop_blocks_for_free", "request")


def free_blocks(facts: ReleaseFacts) -> tuple[Site, ...]:
    """The place where a request's blocks are let go of: read, finished, aborted or preempted."""
    seams = (_free, _pop_blocks) if facts.frees_blocks_later else (_free,)
    return tuple(seam(facts) for seam in seams)


# --- the API server --------------------------------------------------------------

_CLIENT = Place("vllm.v1.engine.async_llm", "AsyncLLM")

#: Where the API server's engine client takes a request.
server_add_request = _at(
    _CLIENT, "add_request", lambda facts: facts.server_request[1:], front_end=True
)


#: Where the API server takes a request to ``/v1/completions``.
def create_completion(facts: ReleaseFacts) -> Site:
    """Returns the site where the API server takes a completion; P is told if that fails."""
    place = Place(facts.completions_module, "OpenAIServingCompletion")
    name = "_create_completion" if facts.tells_of_rejections else "create_completion"
    return _at(place, name, "request", "raw_request", front_end=True)(facts)


def front_end_modules(facts: ReleaseFacts) -> tuple[str, ...]:
    """The modules of the API server that a patch wraps, which need not import the connector."""
    return (_CLIENT.module, facts.completions_module)
