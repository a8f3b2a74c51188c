"""Digests of what a real worker holds, in the planes that it has read of the release's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpatch.checks.digests.cache_digests import CacheDigests, memories_of
from kvpatch.checks.digests.digest_weights import Weights
from kvpatch.checks.digests.digests import Digests
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList, kernel_blocks

RANGE_TOKENS = 32


def digests_of(
    planes: Sequence[Plane],
    tensors: Mapping[str, Any],
    table: Sequence[int],
    block_tokens: int,
    end_token: int,
) -> list[Digests]:
    """Of a request's first tokens; planes of other kernel blocks by themselves.

    Args:
        table: the request's blocks, of so many tokens.
    """
    found = []
    for tokens in sorted({plane.counts.block_tokens for plane in planes}):
        chosen = [plane for plane in planes if plane.counts.block_tokens == tokens]
        blocks = BlockList(kernel_blocks(table, block_tokens // tokens), tokens)
        memories = memories_of({plane.layer: tensors[plane.layer] for plane in chosen})
        reader = CacheDigests(memories, chosen, RANGE_TOKENS)
        found.append(reader.begin(blocks, 0, end_token, Weights(b"lab")).read())
    return found
