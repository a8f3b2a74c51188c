"""As many blocks are registered as the tensors have.

Why:
    An elastic allocator hands out tensors with more blocks than were planned
    (kvcached sizes them by virtual memory). From 0.18 on the connector registers
    the planned number: a tensor ``[4096, 2, 16, 8, 128]`` for a plan of 1024 is
    refused by an assertion, and from 0.29 on one with exactly twice the blocks is
    quietly taken for two regions.
Where:
    The worker, on P and on D.
How:
    Every attention layer's tensor is read before anything is registered. If all
    agree on a number of blocks, the worker's plan is set to it, on that worker
    alone. Tensors that disagree, overlap themselves, have no blocks or are of no
    known shape are refused.
Upstream:
    kvcached #311 and #312; vLLM has the assertion, and no issue of its own.
Remove when:
    The connector counts blocks in the tensors again, as it did <= 0.17.
"""

from __future__ import annotations

from kvpatch.core.ledger import Patch
from kvpatch.load.registration import registration_step

PATCH = Patch(slug="block_count", wire_affecting=True, sites=registration_step, document=__doc__)
