"""D says in what a P with another compatibility hash differs, and can accept that alone.

Why:
    From 0.13 on the handshake carries a hash of a short list of factors. Where P's is another, D
    fails every request of P's with two hashes and a guess, and the release's own way out
    (``enforce_handshake_compat: false``) leaves out the whole comparison, model and data type
    too: bytes of another model are then read, and answers are wrong with HTTP 200.
Where:
    D's worker. P needs nothing.
How:
    The worker's own hash is compared with P's in the thread of the handshake. Where they differ, D
    hashes what it is itself with every version of vLLM and every attention backend, until P's hash
    comes out; in some 0.3 s, with pauses, and once for each hash. The refusal then says "P runs
    vLLM 0.31.0 with FLASHINFER; this engine runs 0.32.0 with FLASH_ATTN", and what to set; for
    anything else it says what D's own hash is made of. ``KVPATCH_ACCEPT`` names factors that may
    differ (``vllm_version``, ``attn_backend``). What is accepted is checked by what both releases
    and backends make of a block, and then as any heterogeneous peer is, by geometry and kinds. Of
    model, data types and all else nothing is ever waived.
Upstream:
    vLLM #52999; llm-d #499, dynamo #10027.
Limits:
    What cannot be accepted is not looked for: of a P with another model, data type or drafter, or
    of a build that is no release, D says its own factors, and not P's. In push mode, and where the
    release's own list is not the one that is known, stock's refusal stays. Nothing is compared
    where ``enforce_handshake_compat`` is false. Accepted are releases and backends that kvpatch
    knows, and layers that hold plain rows of tokens.
Remove when:
    The connector says which factor differs, and can accept one alone.
"""

from __future__ import annotations

from kvpatch.core.ledger import Patch, Site, Step
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.registration import registration_step


def _sites(facts: ReleaseFacts) -> dict[Site, Step]:
    return registration_step(facts) if facts.states_hash else {}


PATCH = Patch(
    slug="named_factors",
    wire_affecting=False,
    sites=_sites,
    not_needed="<= 0.12 a handshake has no hash",
    document=__doc__,
)
