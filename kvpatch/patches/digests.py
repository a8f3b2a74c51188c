"""D reports a load only once its bytes are those that P had computed.

Why:
    A wrong byte in a load is an answer over a wrong context, with HTTP 200. Whatever changes bytes
    between P's cache and D's (a bug of vLLM's, NIXL's, a driver's or ours), nobody looks.
Where:
    Schedulers and workers of both sides; like pairs too. ``KVPATCH_DIGEST=off``, the default,
    makes and asks for nothing; ``sample`` looks at some of a request's tokens, ``all`` at all.
How:
    When a request is over that D will read, P's scheduler has its workers digest it, as the step
    behind begins, on a thread; the numbers go into a table in host memory, and P's answer says
    where (``kvpatch_digest``, one string; what travels between P's scheduler and its workers goes
    with what ``stale_blocks`` says). A digest counts only if the word of the request's hold
    still stood when its bytes had been read, so that stale ones are never blessed. D reads the
    data, the word and the digest, digests what it has placed, and compares by layer, keys or
    values, head and range of tokens. Other bytes fail the load, and one line says where they are.
Upstream:
    None; sglang#39500 has a check of its own kind.
Limits:
    As ``stale_blocks``, without which there is none. Host buffers, recurrent state between
    unlike numbers of ranks and devices without streams are not covered. A P that promises no
    digest, or is too late with it, leaves the load unchecked, and it is counted as such.
Remove when:
    The connector compares what it has read with what P had.
"""

from __future__ import annotations

from kvpatch.core import seams, settings
from kvpatch.core.ledger import Patch, Site, Step, Switch, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.registration import registration_step
from kvpatch.worker.engine_steps import Around, around
from kvpatch.worker.envelope import read_step


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    if not facts.listens_in_scheduler:
        return {}
    from kvpatch.checks import worker_digests  # what is off is not imported

    found: dict[Site, Wrapper | Step] = {
        **registration_step(facts, worker_digests.make_table),
        seams.bind_connector_metadata(facts): Step(read_step, worker_digests.hear),
        seams.transfer_results(facts): Step(around, Around(after=worker_digests.leave_freed)),
    }
    if facts.can_sleep:
        left = Around(before=worker_digests.leave_caches)
        found[seams.unregister_kv_caches(facts)] = Step(around, left)
    return found


PATCH = Patch(
    slug="digests",
    wire_affecting=False,
    sites=_sites,
    not_needed="<= 0.11.0 P's scheduler does not know what its workers state, nor that they hold",
    document=__doc__,
    switch=Switch(settings.DIGEST, settings.digest),
)
