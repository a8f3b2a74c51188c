"""The blocks of an aborted request are not handed out while they are being written to.

Why:
    A client that gives up while D loads its prompt ends the request, and <= 0.15 its
    blocks are free at once. The read goes on and writes into them, whoever has
    them by then: another request answers with tokens of the wrong prompt.
Where:
    vLLM's scheduler, on D.
How:
    As 0.16 does, the blocks of a request that ends while it is loaded are kept until the
    workers report the load, done or failed. What was reported and not yet scheduled
    is forgotten, so that a later request of the same name is not taken for it. On releases <= 0.13
    clients choose names: a request that comes back under its name gets blocks of its own,
    and is loaded when the workers have reported the first load, for they report by name.
Upstream:
    0.16 delays freeing in `finish_requests`.
Limits:
    An engine that has nothing else to do frees them with its next step, as it does on P.
Remove when:
    0.15 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpatch.core.ledger import Patch, Site, Step, Wrapper
from kvpatch.core.releases import ReleaseFacts


def _sites(facts: ReleaseFacts) -> Mapping[Site, Wrapper | Step]:
    if facts.keeps_aborted_blocks:  # from 0.16 on
        return {}
    from kvpatch.legacy import aborted_loads

    return aborted_loads.sites(facts)


PATCH = Patch(
    slug="aborted_loads",
    wire_affecting=False,
    sites=_sites,
    not_needed="since 0.16 the release keeps them itself",
    document=__doc__,
)
