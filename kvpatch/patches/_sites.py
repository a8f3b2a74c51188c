"""The connector's seams as sites, per generation."""

from __future__ import annotations

from kvpatch._versions import Generation
from kvpatch.core.ledger import Site


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


def nixl_handshake(generation: Generation) -> Site:
    """Where a worker asks a peer for its metadata; these parameters to 0.13."""
    return Site(
        module=generation.worker_module,
        owner=generation.worker_class,
        name="_nixl_handshake",
        kind="function",
        parameters=("self", "host", "port", "remote_tp_size", "expected_engine_id"),
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


def handshake_listener(generation: Generation) -> Site:
    """The thread that answers handshakes: the worker's to 0.11.0, then the scheduler's."""
    first = ("encoded_data", "ready_event", "stop_event")
    by_host = (*first, "host", "port")  # from 0.22, which ends g0200
    if generation.slug in _BEFORE_TEXTS:
        owner = generation.worker_module, generation.worker_class
        parameters: tuple[str, ...] = ("metadata", "ready_event", "base_port", "tp_rank")
    else:
        owner = generation.scheduler_module, generation.scheduler_class
        is_by_host = generation.slug in ("g0230", "g0240", "g0260", "g0290", "g0300")
        parameters = by_host if is_by_host else (*first, "port")
    return Site(
        module=owner[0],
        owner=owner[1],
        name="_nixl_handshake_listener",
        kind="staticmethod",
        parameters=parameters,
        or_parameters=by_host if generation.slug == "g0200" else None,
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


def worker_init(generation: Generation) -> Site:
    """Where a worker asks whether its device's memory can be registered."""
    return Site(
        module=generation.worker_module,
        owner=generation.worker_class,
        name="__init__",
        kind="function",
        parameters=_init_parameters(generation),
    )


def scheduler_init(generation: Generation) -> Site:
    """Where the connector's scheduler half is made."""
    return Site(
        module=generation.scheduler_module,
        owner=generation.scheduler_class,
        name="__init__",
        kind="function",
        parameters=_init_parameters(generation),
    )


def _init_parameters(generation: Generation) -> tuple[str, ...]:
    plan = () if generation.slug in _WITHOUT_PLAN else ("kv_cache_config",)
    return ("self", "vllm_config", "engine_id", *plan)


def _connector(generation: Generation, name: str, *parameters: str) -> Site:
    return Site(
        module=generation.connector_module,
        owner=generation.connector_class,
        name=name,
        kind="function",
        parameters=("self", *parameters),
    )


def get_num_new_matched_tokens(generation: Generation) -> Site:
    """Where vLLM asks, of a request that it could schedule, what will be loaded."""
    return _connector(generation, "get_num_new_matched_tokens", "request", "num_computed_tokens")


def scheduler_matched_tokens(generation: Generation) -> Site:
    """Where the connector's scheduler half says how many tokens would be loaded."""
    return Site(
        module=generation.scheduler_module,
        owner=generation.scheduler_class,
        name="get_num_new_matched_tokens",
        kind="function",
        parameters=("self", "request", "num_computed_tokens"),
    )


def set_xfer_handshake_metadata(generation: Generation) -> Site:
    """Where the connector's scheduler half is handed what its workers state; from 0.11.1."""
    return Site(
        module=generation.scheduler_module,
        owner=generation.scheduler_class,
        name="set_xfer_handshake_metadata",
        kind="function",
        parameters=("self", "metadata"),
    )


def connector_meta(generation: Generation) -> Site:
    """Where vLLM asks for a step's metadata, in pull and in push mode."""
    return _connector(generation, "build_connector_meta", "scheduler_output")


def request_finished(generation: Generation) -> tuple[Site, ...]:
    """Where vLLM says that a request is over, and gets what P's answer carries."""
    names = ["request_finished"]
    if generation.slug not in _WITHOUT_PLAN:
        names.append("request_finished_all_groups")
    return tuple(_connector(generation, name, "request", "block_ids") for name in names)


def wait_for_save(generation: Generation) -> Site:
    """What vLLM calls in a worker once the model has run."""
    return _connector(generation, "wait_for_save")


def set_host_xfer_buffer_ops(generation: Generation) -> Site:
    """Where a platform's runner hands over its copies for the release's own buffer."""
    return _connector(generation, "set_host_xfer_buffer_ops", "copy_operation")


def _core(name: str, *parameters: str) -> Site:
    return Site(
        module="vllm.v1.core.sched.scheduler",
        owner="Scheduler",
        name=name,
        kind="function",
        parameters=("self", *parameters),
    )


def schedule(generation: Generation) -> Site:
    """A step of vLLM's scheduler."""
    throttle = ("throttle_prefills",) if generation.slug in _THROTTLES else ()
    return _core("schedule", *throttle)


def server_add_request(generation: Generation) -> Site:
    """Where the API server's engine client takes a request."""
    first, *others = _taken_by_server(generation.slug)
    return Site(
        module="vllm.v1.engine.async_llm",
        owner="AsyncLLM",
        name="add_request",
        kind="function",
        parameters=first,
        or_parameters=others[0] if others else None,
        is_front_end=True,
    )


def _taken_by_server(slug: str) -> list[tuple[str, ...]]:
    """The parameters of a generation's first releases, and of its last where they are others."""
    asked = ("self", "request_id", "prompt", "params", "arrival_time", "lora_request")
    first = (*asked, "tokenization_kwargs", "trace_headers", "priority", "data_parallel_rank")
    text = (*first, "prompt_text")  # from 0.11.1
    ended = (*text, "reasoning_ended")  # from 0.17
    parsed = (*ended, "reasoning_parser_kwargs")  # from 0.20.1
    session = (*first, "session_id", *parsed[len(first) :])  # from 0.28
    hints = (*session, "kv_hints")  # from 0.31
    found: dict[str, list[tuple[str, ...]]] = {
        "g0160": [text, ended],
        "g0180": [ended],
        "g0200": [ended, parsed],
        "g0230": [parsed],
        "g0240": [parsed],
        "g0260": [parsed, session],
        "g0290": [session],
        "g0300": [session, hints],
    }
    return found.get(slug, [first if slug in _BEFORE_TEXTS else text])


def child_sampling(generation: Generation) -> Site:
    """Where the front end makes the requests for several answers (``n``) to one prompt."""
    return Site(
        module="vllm.v1.engine.parallel_sampling",
        owner="ParentRequest",
        name="get_child_info",
        kind="function",
        parameters=("self", "index"),
        is_front_end=True,
    )


def create_completion(generation: Generation) -> Site:
    """Where the API server takes a request to ``/v1/completions``; elsewhere from 0.15 on."""
    before, after = (
        f"vllm.entrypoints.openai.{name}" for name in ("serving_completion", "completion.serving")
    )
    is_old = generation.slug in _WITHOUT_PLAN and generation.slug != "g0160"
    return Site(
        module=before if is_old else after,
        owner="OpenAIServingCompletion",
        name="create_completion",
        kind="function",
        parameters=("self", "request", "raw_request"),
        is_front_end=True,
        or_module=after if generation.slug == "g0140" else None,
    )


def add_request(generation: Generation) -> Site:
    """Where vLLM's scheduler takes a request."""
    return _core("add_request", "request")


def finish_requests(generation: Generation) -> Site:
    """Where vLLM's scheduler ends requests from outside: aborts, and failed loads."""
    return _core("finish_requests", "request_ids", "finished_status")


def connector_finished(generation: Generation) -> Site:
    """Where vLLM's scheduler asks whether a request that is over keeps its blocks."""
    return _core("_connector_finished", "request")


def update_from_kv_xfer_finished(generation: Generation) -> Site:
    """Where vLLM's scheduler hears what its workers have sent and received."""
    first = generation.slug == "g0100"
    output = "model_runner_output" if first else "kv_connector_output"
    return _core("_update_from_kv_xfer_finished", output)


def update_requests_with_invalid_blocks(generation: Generation) -> Site:
    """Where vLLM's scheduler finds the requests whose blocks could not be loaded."""
    first = ("self", "requests", "invalid_block_ids")
    return Site(
        module="vllm.v1.core.sched.scheduler",
        owner="Scheduler",
        name="_update_requests_with_invalid_blocks",
        kind="function",
        parameters=(*first, "num_scheduled_tokens", "evict_blocks"),
        or_parameters=(*first, "evict_blocks"),  # 0.18
    )


def get_block_ids_with_load_errors(generation: Generation) -> Site:
    """Where vLLM asks which blocks could not be loaded; from 0.11.1."""
    return _connector(generation, "get_block_ids_with_load_errors")


def start_load_kv(generation: Generation) -> Site:
    """Where a worker is told what to read in a step."""
    return Site(
        module=generation.worker_module,
        owner=generation.worker_class,
        name="start_load_kv",
        kind="function",
        parameters=("self", "metadata"),
    )


def free_blocks(generation: Generation) -> Site:
    """Where a request's blocks are let go of: read, finished, aborted or preempted."""
    return Site(
        module="vllm.v1.core.kv_cache_manager",
        owner="KVCacheManager",
        name="free",
        kind="function",
        parameters=("self", "request"),
    )


# To 0.17 a connector knows one cache group.
_WITHOUT_PLAN = ("g0100", "g0101", "g0102", "g0110", "g0111", "g0130", "g0140", "g0160")
_BEFORE_TEXTS = ("g0100", "g0101", "g0102", "g0110")
_THROTTLES = ("g0240", "g0260", "g0290", "g0300")
