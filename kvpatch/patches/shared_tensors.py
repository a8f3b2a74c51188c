"""Layers that share a tensor are registered once.

Why:
    The hybrid allocator lets layers of different groups share a tensor. Old
    releases register each layer's: 34 layers over 5 tensors become 34
    registrations of memory that NIXL already has, and a peer is told of 68
    regions where there are 10.
Where:
    The worker, on P and on D.
How:
    Only the first layer of every tensor is handed to the registration.
Upstream:
    vLLM #23079, merged for 0.10.2.
Remove when:
    0.10.1.1 is no longer supported.
"""

from __future__ import annotations

from kvpatch.core.ledger import Patch, Site, Step
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.registration import registration_step


def _sites(facts: ReleaseFacts) -> dict[Site, Step]:
    return {} if facts.registers_shared_tensors_once else registration_step(facts)


PATCH = Patch(
    slug="shared_tensors",
    wire_affecting=True,
    sites=_sites,
    not_needed="since 0.10.2 a shared tensor is registered once",
    document=__doc__,
)
