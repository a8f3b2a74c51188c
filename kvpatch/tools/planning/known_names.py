"""Which options of ``vllm serve`` and which variables a plan takes.

Those that it reads, and those that change neither what the caches are nor what is sent. Of every
other one, vLLM's or not, nobody has looked at what it does to a transfer: that is no plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions, CannotPlan
from kvpatch.tools.planning.arguments import plain


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _names(
    """
    attention_backend attention_config block_size data_parallel_size decode_context_parallel_size
    disable_hybrid_kv_cache_manager distributed_executor_backend dtype enable_prefix_caching
    kv_cache_dtype kv_cache_layout kv_transfer_config mamba_cache_dtype mamba_ssm_cache_dtype model
    model_tag nnodes pipeline_parallel_size port prefill_context_parallel_size speculative_config
    tensor_parallel_size
    """
)
#: Which weights there are: other ones make other keys and values, and nobody compares them.
_OF_WEIGHTS = ("revision", "code_revision", "quantization", "enable_lora", "lora_modules")
_OF_NO_MATTER = _names(
    """
    all2all_backend allow_credentials allowed_headers allowed_local_media_path
    allowed_media_domains allowed_methods allowed_origins api_key api_server_count async_scheduling
    chat_template chat_template_content_format compilation_config cpu_distributed_timeout_seconds
    cpu_offload_gb cuda_graph_sizes cudagraph_capture_sizes cudagraph_metrics
    data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_rank data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank
    dbo_decode_token_threshold dbo_prefill_token_threshold default_chat_template_kwargs
    disable_access_log_for_endpoints disable_cascade_attn disable_custom_all_reduce
    disable_fastapi_docs disable_log_requests disable_log_stats disable_uvicorn_access_log
    distributed_timeout_seconds download_dir enable_auto_tool_choice enable_chunked_prefill
    enable_dbo enable_eplb enable_expert_parallel enable_flashinfer_autotune
    enable_force_include_usage enable_log_deltas enable_log_outputs enable_log_requests
    enable_logging_iteration_details enable_mfu_metrics enable_prompt_tokens_details
    enable_request_id_headers enable_server_load_tracking enable_sleep_mode enforce_eager
    eplb_config exclude_tools_when_tool_choice_none expert_placement_strategy generation_config
    gpu_memory_utilization grpc headless host hf_token ignore_patterns kernel_config
    kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample kv_events_config
    language_model_only limit_mm_per_prompt linear_backend load_format log_config_file log_level
    logits_processors logprobs_mode long_prefill_token_threshold master_addr master_port
    max_cudagraph_capture_size max_cpu_loras max_log_len max_logprobs max_long_partial_prefills
    max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_partial_prefills
    max_num_seqs max_parallel_loading_workers middleware mm_processor_cache_gb mm_processor_kwargs
    model_loader_extra_config moe_backend node_rank num_gpu_blocks_override numa_bind
    numa_bind_cpus numa_bind_nodes optimization_level otlp_traces_endpoint
    override_generation_config performance_mode prefix_caching_hash_algo profiler_config
    reasoning_parser reasoning_parser_plugin response_role return_tokens_as_token_ids root_path
    safetensors_load_strategy scheduling_policy seed served_model_name shutdown_timeout
    show_hidden_metrics_for_version skip_mm_profiling skip_tokenizer_init ssl_ca_certs
    ssl_cert_reqs ssl_certfile ssl_keyfile stream_interval structured_outputs_config swap_space
    tokenizer tokenizer_mode tokenizer_revision tool_call_parser tool_parser_plugin tool_server
    trust_remote_code trust_request_chat_template ubatch_size uds use_tqdm_on_load
    uvicorn_log_level
    """
)
_TAKEN = _READ | _OF_NO_MATTER
_ABOUT_CACHES = {
    "calculate_kv_scales": "each engine computes scales of its own, which are not sent",
    "disable_sliding_window": "layers with windows become layers without",
    "hf_overrides": "the model is another one than its config.json says: give one that says it",
    "kv_cache_dtype_skip_layers": "layers of one model have caches of several types",
    "kv_sharing_fast_prefill": "layers share caches",
    "mamba_block_size": "it says how often states are kept",
    "mamba_cache_mode": "it says which of a prompt's states are kept",
}
#: Of these, what a description answers by its caches, where both sides have it alike.
_ANSWERED = (
    *("disable_sliding_window", "hf_overrides", "kv_cache_dtype_skip_layers", "mamba_block_size"),
)

_VARIABLES = _names(
    """
    ENABLE_KVCACHED VLLM_ATTENTION_BACKEND VLLM_KV_CACHE_LAYOUT VLLM_NIXL_ABORT_REQUEST_TIMEOUT
    VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_PLUGINS
    VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_SSM_CONV_STATE_LAYOUT VLLM_TARGET_DEVICE

    VLLM_ALL2ALL_BACKEND VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING
    VLLM_API_KEY VLLM_ASSETS_CACHE VLLM_CACHE_ROOT VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT
    VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_COMPILE_CACHE VLLM_DO_NOT_TRACK
    VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_ENGINE_READY_TIMEOUT_S
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HOST_IP VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    VLLM_LOG_STATS_INTERVAL VLLM_NCCL_SO_PATH VLLM_NO_USAGE_STATS VLLM_PORT
    VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RPC_BASE_PATH VLLM_RPC_TIMEOUT VLLM_SERVER_DEV_MODE
    VLLM_SKIP_DEEP_GEMM_WARMUP VLLM_SKIP_P2P_CHECK VLLM_SLEEP_WHEN_IDLE VLLM_TORCH_PROFILER_DIR
    VLLM_USAGE_SOURCE VLLM_USE_DEEP_GEMM VLLM_USE_MODELSCOPE VLLM_USE_V1
    VLLM_WORKER_MULTIPROC_METHOD
    """
)
_FAMILIES = ("VLLM_CPU_", "VLLM_DP_", "VLLM_LOGGING_", "VLLM_MOE_", "VLLM_USE_FLASHINFER_MOE_")
_LEAVE_OUT = "leave it out of the file to have the rest planned"
#: Variables with these beginnings are vLLM's, kvpatch's and kvcached's; others are not looked at.
_OURS = ("VLLM_", "KVPATCH_", "ENABLE_KV")


def check_options(options: Mapping[str, Any], source: str, *, is_described: bool) -> None:
    """Holds options against those that a plan takes.

    Args:
        options: with underscores; one that begins with ``no_`` denies another.
        is_described: whether vLLM has said what the caches come to.

    Raises:
        CannotPlan: one is not among them.
    """
    for name in options:
        affirmed = name.removeprefix("no_")
        if affirmed in _TAKEN or affirmed in _OF_WEIGHTS:
            continue
        if is_described and affirmed in _ANSWERED:
            continue
        reason = _ABOUT_CACHES.get(affirmed)
        if reason is not None:
            raise CannotPlan(f"{source}: --{plain(name)} is not planned for: {reason}", _LEAVE_OUT)
        near = difflib.get_close_matches(affirmed, _TAKEN, n=1, cutoff=0.8)
        hint = f" (did you mean --{plain(near[0])}?)" if near else ""
        raise CannotPlan(
            f"{source}: --{plain(name)} is not planned for: kvpatch does not know what it does to "
            f"the caches or to a transfer{hint}",
            _LEAVE_OUT,
        )


def check_variables(environment: Mapping[str, str], source: str) -> None:
    """Holds variables against those that a plan takes.

    Raises:
        BadOptions: one of kvpatch's is none.
        CannotPlan: one of vLLM's is not among them.
    """
    own = {settings.ENABLE, *settings.NAMES}
    for name in environment:
        if not name.startswith(_OURS) or name in own or name in _VARIABLES:
            continue
        if name.startswith(_FAMILIES):
            continue
        near = difflib.get_close_matches(name, {*own, *_VARIABLES}, n=1, cutoff=0.8)
        hint = f" (did you mean {near[0]}?)" if near else ""
        if not name.startswith("VLLM_"):
            raise BadOptions(
                f"{source}: {name} is no variable of kvpatch's{hint}",
                "write the name that it has, or leave it out",
            )
        raise CannotPlan(
            f"{source}: {name} is not planned for: kvpatch does not know what it does to the "
            f"caches or to a transfer{hint}",
            _LEAVE_OUT,
        )


def check_weights(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> None:
    """Holds what says which weights there are on both sides against one another.

    Raises:
        CannotPlan: they differ.
    """
    for name in (*_OF_WEIGHTS, *_ANSWERED):
        theirs, ours = prefill.get(name), decode.get(name)
        if (theirs or None) != (ours or None):
            raise CannotPlan(
                f"--{plain(name)} is {theirs} on P and {ours} on D: other weights make other keys "
                "and values, and nothing compares them",
                "give it alike to both sides",
            )
