"""A load that fails does not end the engine, and is not reported as done.

Why:
    A P that dies, or a handshake that is refused, ought to fail one request. To
    0.11.0 D knows no failed load: ``KeyError`` on the engine that was never met, or
    NIXL's error, ends it. From 0.11.1 to 0.21 `get_finished` looks up the block size
    of the refused engine: ``KeyError`` again; and <= 0.13.0 a read that breaks off
    takes its metadata along, which `get_finished` asserts. From 0.18 to 0.29, with
    several cache groups (the hybrid allocator), a failed load is reported as received,
    and the model goes on over memory that nobody wrote.
Where:
    D's workers, and for several cache groups its scheduler.
How:
    From 0.11.1 to 0.21 the release is not shown its failed requests: they are added to
    what it reports, without the work that follows a received one, as 0.22 does. Their
    blocks are booked as invalid, so that they fail by the load-failure policy.
    With several cache groups the blocks of all of them are booked as invalid, and the
    scheduler, whose account of invalid blocks is of one group, fails the request, or has
    all of it computed. From 0.22 on a request is reported when the last of its transfers
    is over. <= 0.11.0, which knows no way to fail one request, it is left waiting with an
    error in the log, until its client gives it up: then it is reported, and its blocks are
    free. <= 0.11.0 a peer is first asked on a socket of our own, for 4.5 s at most: the
    release waits for the answer of a dead one for ever, and so do the handshakes behind it.
Upstream:
    Failed loads came with 0.11.1, and with it an end to the wait for a handshake; 0.22
    passes over failed requests, and 0.30 reports them by themselves.
Remove when:
    0.29 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpatch.core.ledger import Patch, Site, Step, Wrapper
from kvpatch.core.releases import ReleaseFacts


def _sites(facts: ReleaseFacts) -> Mapping[Site, Wrapper | Step]:
    if facts.failed_loads == "as failed":  # from 0.30 on
        return {}
    from kvpatch.legacy import failed_loads

    return failed_loads.sites(facts)


PATCH = Patch(
    slug="failed_loads",
    wire_affecting=False,
    sites=_sites,
    not_needed="since 0.30 failed requests are reported as failed",
    document=__doc__,
)
