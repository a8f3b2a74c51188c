"""Which peers of smaller blocks the release may read: none that it always reads wrongly."""

from __future__ import annotations

from dataclasses import dataclass

from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.worker.release_worker import ReleaseWorker


@dataclass(frozen=True)
class JoiningCache:
    """A cache of larger blocks, as far as the release puts smaller ones together in it.

    Attributes:
        key_order: None where nobody knows it.
        decode_contexts: ranks that share out a block's tokens.
        layout: as it is stated.
    """

    key_order: KeyOrder | None
    decode_contexts: int
    is_mla: bool
    layout: str | None


def why_misread(release: ReleaseWorker) -> str:
    """Why the release puts wrong bytes into larger blocks, whatever the request; empty: no."""
    worker = release.worker
    cache = JoiningCache(
        key_order=release.key_order(),
        decode_contexts=max(release.context_sizes[:1], default=1),
        is_mla=bool(worker.use_mla),
        layout=release.stated_layout,
    )
    return why_joined_wrongly(cache, release.facts)


def why_joined_wrongly(cache: JoiningCache, facts: ReleaseFacts) -> str:
    """As :func:`why_misread`, of what is known of a cache."""
    if cache.key_order is not KeyOrder.ROW_MAJOR:
        return "takes keys that the backend keeps by column for rows"
    if cache.decode_contexts > 1 and not facts.states_context_parallelism:
        return "does not know that ranks share out the tokens of a block"
    if facts.pairs_heads_by_layout:
        return ""
    if cache.is_mla:  # [block, 1, token, channel], of which it takes the second for tokens
        return "zeroes all of a prompt's last block (0.29 to 0.31)" if facts.names_layouts else ""
    if facts.cache_shape != "keys first":
        return "puts heads in wrong places of larger blocks (0.23 to 0.31)"
    return "" if cache.layout == "HND" else "takes NHD for HND in larger blocks"
