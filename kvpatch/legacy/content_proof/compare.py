"""What a peer's blocks show, beside a sample of what this engine has computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from kvpatch.legacy.content_proof.distance import (
    clearly_nearest,
    distance,
    farthest_part,
    is_much_nearer,
    places_that_differ,
    values_of,
)
from kvpatch.legacy.content_proof.kernel_block_splits import PromptChunk, chunks_to_look_at
from kvpatch.legacy.content_proof.samples import (
    LandedBlocks,
    Sample,
    SampledPlanes,
    plane_like,
    shared_heads,
)

if TYPE_CHECKING:
    from kvpatch.connector.handshake.remote_ranks import RemoteRank
    from kvpatch.connector.read_request import ReadRequest
    from kvpatch.legacy.content_proof.distance import Values

#: What is looked at of a prompt for its layout.
_LAYOUT_TOKENS = 256
#: A chunk of fewer tokens shows nothing.
_LEAST_TOKENS = 4
#: As far away as values that have nothing to do with one another, or nearly.
_FAR = 0.5


def blocks_showing_layout(
    sampled: SampledPlanes, rank: RemoteRank, request: ReadRequest, most: int
) -> tuple[int, ...]:
    """The peer's first blocks of a prompt, where no block is cut.

    It returns no blocks where none could tell: there is no whole one, or one slid out of a window.

    Args:
        most: blocks that may be read.
    """
    metadata = rank.metadata
    block_tokens = plane_like(rank, sampled.planes[0]).counts.block_tokens
    found = request.remote_blocks[sampled.number]
    blocks = found[: min(most, max(1, _LAYOUT_TOKENS // block_tokens))]
    if not blocks or 0 in blocks or max(blocks) >= metadata.blocks:
        return ()
    return blocks


def chunks_showing_split(
    sampled: SampledPlanes,
    rank: RemoteRank,
    parts: Iterable[int],
    request: ReadRequest,
    known: range,
    most: int,
) -> tuple[PromptChunk, ...]:
    """Where a prompt's chunks would lie, for each way to cut blocks that is left.

    Args:
        parts: those ways.
        known: the tokens of the prompt that we have computed, or will have.
        most: kernel blocks that may be read.
    """
    if sampled.number >= len(request.remote_blocks):
        return ()
    ids = request.remote_blocks[sampled.number]
    kernel_tokens = plane_like(rank, sampled.planes[0]).counts.block_tokens
    ways = []
    for number in sorted(parts):
        first = 0
        if sampled.group.window_tokens and sampled.group.is_clipped:  # the end of a table
            first = -(-request.remote_tokens // (kernel_tokens * number)) - len(ids)
        if first >= 0:
            found = chunks_to_look_at(ids, number, kernel_tokens, known, first)
            ways.append(
                [
                    chunk
                    for chunk in found
                    if chunk.block < rank.metadata.blocks and chunk.tokens >= _LEAST_TOKENS
                ]
            )
    # The first ones of each way, then the second ones: there may be too many.
    in_turns = (chunk for chunks in zip_longest(*ways) for chunk in chunks if chunk is not None)
    return tuple(islice(dict.fromkeys(in_turns), most))


def layout_shown(
    sampled: SampledPlanes, ranks: Mapping[str, RemoteRank], sample: Sample, landed: LandedBlocks
) -> tuple[str | None, dict[str, float]]:
    """(the layout under which the peer holds what we have computed, distances); else None."""
    distances = _distances(sampled, ranks, sample, landed)
    if not distances:
        return None, distances
    if len(distances) > 1:
        return clearly_nearest(distances), distances
    (only,) = distances
    return (only if is_much_nearer(distances[only], _FAR) else None), distances


def _distances(
    sampled: SampledPlanes, ranks: Mapping[str, RemoteRank], sample: Sample, landed: LandedBlocks
) -> dict[str, float]:
    """By layout the mean over all sampled planes; empty where too little is there to tell."""
    found: dict[str, list[float]] = {name: [] for name in ranks}
    for plane in sampled.planes:
        ours = sample.values[(plane.layer, plane.content)]
        dtype = sampled.dtype(plane)
        views = {name: landed.tokens(rank, plane) for name, rank in ranks.items()}
        places = [place for _, place, _ in views.values()]
        mine, heads = shared_heads(plane, next(iter(views.values()))[2])
        tokens = min(ours.shape[0], places[0].shape[0])
        telling = places_that_differ([place[:tokens, heads] for place in places])
        if telling is None:
            return {}
        own = values_of(ours[:tokens, mine][telling], dtype)
        if not own.any():  # zeros are near to zeros
            return {}
        for name, (view, _, _) in views.items():
            found[name].append(distance(own, values_of(view[:tokens, heads][telling], dtype)))
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def chunks_seen(
    sampled: SampledPlanes,
    rank: RemoteRank,
    sample: Sample,
    landed: LandedBlocks,
    chunks: Sequence[PromptChunk],
) -> Iterator[tuple[int, int]]:
    """(chunk, kernel block) of each that holds what we have computed, and nothing like it."""
    kernel_tokens = plane_like(rank, sampled.planes[0]).counts.block_tokens
    own = _own_values(sampled, rank, sample)
    for chunk in chunks:
        start = chunk.number * kernel_tokens - sample.tokens.start
        tokens = min(chunk.tokens, len(sample.tokens) - start)
        if start < 0 or tokens < _LEAST_TOKENS:
            continue
        theirs = []
        for plane in sampled.planes:
            _, heads = shared_heads(plane, plane_like(rank, plane))
            held = landed.of_block(plane, chunk.block)[:tokens, heads]
            theirs.append(values_of(held, sampled.dtype(plane)))
        near = _apart([values[start : start + tokens] for values in own], theirs)
        if is_much_nearer(near, 1.0) and is_much_nearer(
            near, _nearest_like_it(own, start, tokens, kernel_tokens)
        ):
            yield chunk.number, chunk.block


def _own_values(sampled: SampledPlanes, rank: RemoteRank, sample: Sample) -> list[Values]:
    found = []
    for plane in sampled.planes:
        mine, _ = shared_heads(plane, plane_like(rank, plane))
        values = sample.values[(plane.layer, plane.content)][:, mine]
        found.append(values_of(values, sampled.dtype(plane)))
    return found


def _apart(ours: Sequence[Values], theirs: Sequence[Values]) -> float:
    """Of keys and values of both layers those that are farthest apart."""
    return max(farthest_part(a, b) for a, b in zip(ours, theirs, strict=True))


def _nearest_like_it(own: Sequence[Values], start: int, tokens: int, step: int) -> float:
    """How far what is nearest to a chunk is, of a prompt's other chunks and its next tokens.

    A prompt that repeats itself looks alike in several places.
    """
    chunk = [values[start : start + tokens] for values in own]
    length = own[0].shape[0]
    others = [first for first in range(start % step, length - tokens + 1, step) if first != start]
    found = [_apart(chunk, [values[at : at + tokens] for values in own]) for at in others]
    found.append(_apart([c[:-1] for c in chunk], [c[1:] for c in chunk]))
    return min(found)
