"""Which peers of smaller blocks the release may read: none that it always reads wrongly."""

from __future__ import annotations

from typing import Any

from kvpatch.connector.local.release_layouts import Registration
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry import KeyOrder


def why_misread(worker: Any, registration: Registration, facts: ReleaseFacts) -> str:
    """Why the release puts wrong bytes into larger blocks, whatever the request; empty: no."""
    if registration.key_order(worker) is not KeyOrder.ROW_MAJOR:
        return "takes keys that the backend keeps by column for rows"
    contexts = getattr(worker.vllm_config.parallel_config, "decode_context_parallel_size", 1)
    if contexts > 1 and not facts.states_context_parallelism:
        return "does not know that ranks share out the tokens of a block"
    if worker.use_mla or facts.pairs_heads_by_layout:
        return ""
    if facts.cache_shape != "keys first":
        return "puts heads in wrong places of larger blocks (0.23 to 0.31)"
    return "" if worker.kv_cache_layout == "HND" else "takes NHD for HND in larger blocks"
