"""The bodies that patches lean on without wrapping them, per release.

A site's parameters can stay while what happens behind it moves. These are the
bodies that the modules of ``kvpatch`` were written against.
"""

from __future__ import annotations

from kvpatch.core.releases import ReleaseFacts
from kvpatch.patches import load

_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"


def bodies(facts: ReleaseFacts) -> list[tuple[str, str]]:
    """(module, qualified name) of every body whose fingerprint must be known."""
    sites = [site for patch in load() for site in patch.sites(facts)]
    found = [(site.module, f"{site.owner}.{site.name}") for site in sites]
    worker = facts.worker
    found += [(worker.module, f"{worker.owner}.{name}") for name in _of_worker(facts)]
    # The one call that prepares a transfer, and what is paired before it.
    found.append((facts.reader.module, f"{facts.reader.owner}._read_blocks"))
    found += _topology(facts)
    if facts.states_hash:  # made of what, and compared where
        found.append((metadata_module(facts), "compute_nixl_compatibility_hash"))
        found.append(("vllm.config.utils", "hash_factors"))
        found.append((worker.module, f"{worker.owner}._nixl_handshake"))
    if facts.listens_in_scheduler:  # from 0.11.1: by which a CPU's keys lie
        found.append(("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa"))
    package, _, module = facts.scheduler.module.rpartition(".")
    if module == "base_scheduler":  # in push mode another calls the one that is replaced
        push = f"{package}.push_scheduler"
        found.append((push, "NixlPushConnectorScheduler.build_connector_meta"))
    if not facts.keeps_aborted_blocks:
        blocks = "SingleTypeKVCacheManager.free"
        found.append(("vllm.v1.core.single_type_kv_cache_manager", blocks))
        found.append(("vllm.v1.core.sched.scheduler", "Scheduler._free_request"))
    if facts.loses_failed_groups:
        core = ("_handle_invalid_blocks", "_update_waiting_for_remote_kv")
        found += [("vllm.v1.core.sched.scheduler", f"Scheduler.{name}") for name in core]
    return list(dict.fromkeys(found))


def metadata_module(facts: ReleaseFacts) -> str:
    """Of the connector's constants and its hash: a module of the package, or the one there is."""
    package, _, module = facts.worker.module.rpartition(".")
    return facts.worker.module if module == "nixl_connector" else f"{package}.metadata"


# How blocks of a peer that is left to the release are paired, and what becomes of smaller ones.
_PAIRING = (
    "_apply_prefix_caching",
    "_apply_dcp_prefix_caching",
    "_map_block_ids_for_block_size_ratio",
    "post_process_device_kv_on_receive",
)


def _of_worker(facts: ReleaseFacts) -> tuple[str, ...]:
    if not facts.listens_in_scheduler:
        return ("__init__",)
    both = ("__init__", "register_local_xfer_handler")
    if facts.cache_shape == "keys first":
        return both
    if facts.names_layouts:
        return (*both, "_build_fa_local", *_PAIRING)
    packed = ("_register_packed_kv_cache",) if facts.cache_shape == "packed" else ()
    return (*both, "_build_fa_local", *packed)


def _topology(facts: ReleaseFacts) -> list[tuple[str, str]]:
    """What decides whether keys and values are regions of their own."""
    made = "TpKVTopology.__post_init__"
    if not facts.listens_in_scheduler or facts.names_layouts:
        return []
    if not facts.names_remote_request:
        return [(facts.worker.module, f"{facts.worker.owner}.{made}")]
    is_later = facts.agent_metadata >= {"ssm_sizes", "attn_backend_name"}
    return [(_UTILS, "TransferTopology.__post_init__" if is_later else made)]
