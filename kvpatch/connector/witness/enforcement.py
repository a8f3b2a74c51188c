"""Whether a bad load's step can be taken back; else it is only logged."""

from __future__ import annotations

from kvpatch.connector.local.release_worker import ReleaseWorker


def why_not_enforced(release: ReleaseWorker) -> str:
    """Why this engine's scheduler cannot drop what a step makes of a bad load; empty if it can."""
    facts, config = release.facts, release.worker.vllm_config
    if facts.failed_loads == "unknown":
        return "this vLLM knows no failed loads (<= 0.11.0)"
    if config.scheduler_config.async_scheduling:
        return (
            "with async scheduling the next step is on its way before this one's tokens are known: "
            "set --no-async-scheduling"
        )
    if facts.has_cache_groups and len(release.worker.kv_cache_config.kv_cache_groups) > 1:
        return "blocks of several cache groups cannot be told as not loaded"
    if facts.has_other_runner and config.use_v2_model_runner and _computes_again(release):
        return (
            "vLLM's second model runner computes no prompt again: set VLLM_USE_V2_MODEL_RUNNER=0, "
            "or kv_load_failure_policy=fail"
        )
    return ""


def _computes_again(release: ReleaseWorker) -> bool:
    return bool(release.worker.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute")
