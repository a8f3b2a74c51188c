"""The doors to ``kvpatch.legacy``: what the patches ask of it, each for the releases that need it.

The imports stand inside the functions, so that a release which needs none of it imports none of
it, and serves as before where the folder is not there.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpatch.core.ledger import Site, Step, Wrapper
from kvpatch.core.releases import ReleaseFacts

Sites = Mapping[Site, Wrapper | Step]


def aborted_loads(facts: ReleaseFacts) -> Sites:
    """In releases <= 0.15 the blocks of an aborted request are free while they are written to."""
    if facts.keeps_aborted_blocks:
        return {}
    from kvpatch.legacy import aborted_loads

    return aborted_loads.sites(facts)


def failed_loads(facts: ReleaseFacts) -> Sites:
    """In releases <= 0.29 a load that fails ends the engine, or is reported as received."""
    if facts.failed_loads == "as failed":
        return {}
    from kvpatch.legacy import failed_loads

    return failed_loads.sites(facts)


def multi_rank_handshakes(facts: ReleaseFacts) -> Sites:
    """In releases <= 0.13 a worker shakes hands with one rank of its peer alone."""
    if not facts.meets_one_rank:
        return {}
    from kvpatch.legacy import multi_rank

    return multi_rank.sites(facts)


def content_proof(facts: ReleaseFacts) -> Sites:
    """In releases <= 0.20 a handshake does not say all of a block: D finds it out by content."""
    if facts.states_kernel_blocks:
        return {}
    from kvpatch.legacy.content_proof import wrappers

    return wrappers.sites(facts)
