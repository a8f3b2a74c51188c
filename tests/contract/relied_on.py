"""The bodies that patches lean on without wrapping them, per generation.

A site's parameters can stay while what happens behind it moves. These are the
bodies that the adapters in ``kvpatch.vllm`` were written against.
"""

from __future__ import annotations

from kvpatch._versions import Generation
from kvpatch.patches import aborted_loads, failed_loads, load

_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"


def bodies(generation: Generation) -> list[tuple[str, str]]:
    """(module, qualified name) of every body whose fingerprint must be known."""
    sites = [site for patch in load() for site in patch.sites.get(generation.slug, ())]
    found = [(site.module, f"{site.owner}.{site.name}") for site in sites]
    found += [(s.or_module, f"{s.owner}.{s.name}") for s in sites if s.or_module is not None]
    worker = (generation.worker_module, generation.worker_class)
    found += [(worker[0], f"{worker[1]}.{name}") for name in _WORKER[generation.slug]]
    # The one call that prepares a transfer, and what is paired before it.
    found.append((generation.reader_module, f"{generation.reader_class}._read_blocks"))
    found += _TOPOLOGY.get(generation.slug, [])
    if generation.slug in aborted_loads.NEED_IT:
        blocks = "SingleTypeKVCacheManager.free"
        found.append(("vllm.v1.core.single_type_kv_cache_manager", blocks))
        found.append(("vllm.v1.core.sched.scheduler", "Scheduler._free_request"))
    if generation.slug in failed_loads.SEVERAL_GROUPS:
        core = ("_handle_invalid_blocks", "_update_waiting_for_remote_kv")
        found += [("vllm.v1.core.sched.scheduler", f"Scheduler.{name}") for name in core]
    return list(dict.fromkeys(found))


_INIT = ("__init__",)
_INIT_AND_LOCAL = ("__init__", "register_local_xfer_handler")
_FULL_ATTENTION = ("__init__", "register_local_xfer_handler", "_build_fa_local")
# How blocks of a peer that is left to the release are paired, and what becomes of smaller ones.
_PAIRING = (
    "_apply_prefix_caching",
    "_apply_dcp_prefix_caching",
    "_map_block_ids_for_block_size_ratio",
    "post_process_device_kv_on_receive",
)

_WORKER: dict[str, tuple[str, ...]] = {
    "g0100": _INIT,
    "g0101": _INIT,
    "g0102": _INIT,
    "g0110": _INIT,
    "g0111": _INIT_AND_LOCAL,
    "g0130": _INIT_AND_LOCAL,
    "g0140": _INIT_AND_LOCAL,
    "g0160": _INIT_AND_LOCAL,
    "g0180": _INIT_AND_LOCAL,
    "g0200": _INIT_AND_LOCAL,
    "g0230": _FULL_ATTENTION,
    "g0240": _FULL_ATTENTION,
    "g0260": (*_FULL_ATTENTION, "_register_packed_kv_cache"),
    "g0290": (*_FULL_ATTENTION, *_PAIRING),
    "g0300": (*_FULL_ATTENTION, *_PAIRING),
}

# What decides whether keys and values are regions of their own.
_BY_WORKER = [
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector",
        "NixlConnectorWorker.TpKVTopology.__post_init__",
    )
]
_BY_TP = [(_UTILS, "TpKVTopology.__post_init__")]
_BY_TRANSFER = [(_UTILS, "TransferTopology.__post_init__")]
_TOPOLOGY = {
    "g0111": _BY_WORKER,
    "g0130": _BY_TP,
    "g0140": _BY_TP,
    "g0160": _BY_TP,
    "g0180": _BY_TP,
    "g0200": _BY_TRANSFER,
    "g0230": _BY_TRANSFER,
    "g0240": _BY_TRANSFER,
    "g0260": _BY_TRANSFER,
}
