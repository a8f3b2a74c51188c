"""Which peers of smaller blocks the release may read: none that it always reads wrongly."""

from __future__ import annotations

from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.geometry.dimension_order import KeyOrder


def why_misread(release: ReleaseWorker) -> str:
    """Why the release puts wrong bytes into larger blocks, whatever the request; empty: no."""
    worker, facts = release.worker, release.facts
    if release.key_order() is not KeyOrder.ROW_MAJOR:
        return "takes keys that the backend keeps by column for rows"
    decode_contexts = max(release.context_sizes[:1], default=1)
    if decode_contexts > 1 and not facts.states_context_parallelism:
        return "does not know that ranks share out the tokens of a block"
    if worker.use_mla or facts.pairs_heads_by_layout:
        return ""
    if facts.cache_shape != "keys first":
        return "puts heads in wrong places of larger blocks (0.23 to 0.31)"
    return "" if worker.kv_cache_layout == "HND" else "takes NHD for HND in larger blocks"
