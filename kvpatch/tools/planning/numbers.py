"""What a request takes on one of D's workers: descriptors, bytes, memory, and time (estimated)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvpatch.geometry.direct_or_staged import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    Costs,
    direct_seconds,
    is_direct,
    staged_seconds,
    token_bytes,
)
from kvpatch.geometry.direct_plan import plan_runs
from kvpatch.geometry.overlap import Overlap
from kvpatch.geometry.segments import BlockList, Segments, pair_blocks
from kvpatch.peer.remote_ranks import RemoteRank
from kvpatch.tools.planning.caches import layer_number, rank_cache
from kvpatch.tools.planning.engine import PlannedEngine
from kvpatch.tools.planning.ours import staging_bytes, transfer_mode
from kvpatch.tools.planning.pair import Pair, Request


@dataclass(frozen=True)
class Numbers:
    """What a request takes on one of D's workers.

    Attributes:
        descriptors: NIXL's, in the reads that are posted.
        size_bytes: that come over the wire.
        wanted_bytes: of these, those of the prompt's tokens.
        staging_bytes: of the pool that are in use at once.
        direct_regions, staged_regions: of P that are read each way.
        seconds: an estimate.
        costs_of: what the estimate is made of, in words.
    """

    descriptors: int
    size_bytes: int
    wanted_bytes: int
    staging_bytes: int
    direct_regions: int
    staged_regions: int
    seconds: float
    costs_of: str

    @property
    def way(self) -> str:
        """Direct, staged, or both."""
        ways = [
            name
            for name, count in (("direct", self.direct_regions), ("staged", self.staged_regions))
            if count
        ]
        return " and ".join(ways) or "nothing is read"


def costs_of(engine: PlannedEngine, bytes_per_second: float | None) -> tuple[Costs, str]:
    """What moving bytes is taken to cost on D's machine, and where that is from."""
    if engine.device == "cpu":
        costs, source = HOST_MEMORY, "the measured machine's (2 cores, shared memory)"
    else:
        costs, source = DEVICE_MEMORY, "vendors' (a network card of 400 Gbit/s), not measured"
    if bytes_per_second is None:
        return costs, source
    found = replace(
        costs, wire_bytes_per_second=bytes_per_second, chunk_bytes_per_second=bytes_per_second
    )
    return found, f"{source}, with {bytes_per_second / 1e9:g} GB/s as asked"


def read_numbers(
    pair: Pair,
    mappings: tuple[RemoteRank, ...],
    request: Request,
    bytes_per_second: float | None = None,
) -> Numbers:
    """Of a request that kvpatch reads.

    Args:
        mappings: of the ranks that D's first rank reads.
    """
    costs, source = costs_of(pair.decode, bytes_per_second)
    total = Numbers(0, 0, 0, 0, 0, 0, 0.0, source)
    for overlaps, segments in _alike(pair, mappings, request):
        total = _plus(total, _of_overlaps(pair.decode, overlaps, segments, costs))
    return total


def stock_numbers(pair: Pair, request: Request, bytes_per_second: float | None = None) -> Numbers:
    """Of a request that is left to vLLM, which reads whole kernel blocks of every region."""
    costs, source = costs_of(pair.decode, bytes_per_second)
    p = pair.prefill
    first = request.cached // p.block_tokens
    blocks = (-(-request.tokens // p.block_tokens) - first) * p.parts
    runs = size = 0
    regions = 0
    for met in pair.ranks_met(0):
        ours = rank_cache(p, met).geometry
        share = (
            max(1, pair.decode.tp_size // p.tp_size) if ours.has_heads and not p.model.is_mla else 1
        )
        regions += len(ours.addresses)
        # What holds keys and values in one block is read in two pieces, but where it is packed.
        pieces = 2 if ours.kv_split == "together" else 1
        runs += blocks * len(ours.addresses) * pieces
        size += blocks * sum(ours.block_bytes) // share
    return Numbers(runs, size, size, 0, regions, 0, direct_seconds(costs, runs, size), source)


def _alike(
    pair: Pair, mappings: tuple[RemoteRank, ...], request: Request
) -> Iterator[tuple[list[Overlap], Segments]]:
    """Regions that differ in addresses only, each lot with the tokens that are wanted of it."""
    windows = dict(zip(pair.decode.model.attention_layers, pair.decode.model.windows, strict=True))
    layers = rank_cache(pair.decode, 0).geometry.layers.values() if len(mappings) > 1 else ()
    planes = [plane for layer in layers for plane in layer.planes]
    for number, mapping in enumerate(mappings):
        lots: defaultdict[tuple[Hashable, int], list[Overlap]] = defaultdict(list)
        for overlap in mapping.behind(mappings[:number], planes).overlaps:
            window = windows.get(layer_number(overlap.layer), 0)
            lots[overlap.shape, window].append(overlap)
        for (_, window), overlaps in lots.items():
            segments = _segments(pair, request, window)
            if len(segments):
                yield overlaps, segments


def _segments(pair: Pair, request: Request, window: int) -> Segments:
    """The tokens that D wants of a layer, in kernel blocks of both sides."""
    end = request.tokens
    first = min(request.cached, end)
    if window:
        own = pair.decode.block_tokens
        first = max(first, (end - window) // own * own, 0)
    theirs, ours = pair.prefill.kernel_tokens, pair.decode.kernel_tokens
    return pair_blocks(_first_blocks(end, theirs), _first_blocks(end, ours), first, end)


def _first_blocks(end_token: int, block_tokens: int) -> BlockList:
    """As many blocks as a prompt fills, no two of them neighbours: those would be one run."""
    count = -(-end_token // block_tokens)
    return BlockList(2 * np.arange(count, dtype=np.int64), block_tokens)


def _of_overlaps(
    engine: PlannedEngine, overlaps: list[Overlap], segments: Segments, costs: Costs
) -> Numbers:
    """Of regions that are strided alike: one is worked out."""
    overlap, count = overlaps[0], len(overlaps)
    wanted = token_bytes(overlap) * int(segments.tokens.sum()) * count
    mode = transfer_mode(engine)
    goes_straight = mode == "direct" or (
        mode == "auto"
        and (overlap.staged_bytes > staging_bytes(engine) or is_direct(overlap, segments, costs))
    )
    if goes_straight:
        runs = len(plan_runs([(segments, overlap.copies)])) * count
        return Numbers(runs, wanted, wanted, 0, count, 0, direct_seconds(costs, runs, wanted), "")
    blocks = int(np.unique(segments.remote_block).size)
    runs = len(overlap.spans) * blocks * count
    landed = sum(span.span_bytes for span in overlap.spans) * blocks * count
    pooled = sum(span.staged_bytes for span in overlap.spans) * blocks * count
    in_use = min(pooled, staging_bytes(engine))
    seconds = staged_seconds(costs, runs, landed, wanted)
    return Numbers(runs, landed, wanted, in_use, 0, count, seconds, "")


def _plus(one: Numbers, other: Numbers) -> Numbers:
    return Numbers(
        one.descriptors + other.descriptors,
        one.size_bytes + other.size_bytes,
        one.wanted_bytes + other.wanted_bytes,
        max(one.staging_bytes, other.staging_bytes),
        one.direct_regions + other.direct_regions,
        one.staged_regions + other.staged_regions,
        one.seconds + other.seconds,
        one.costs_of,
    )
