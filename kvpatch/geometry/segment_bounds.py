"""Whether segments stay inside the planes that they are used with."""

from __future__ import annotations

from typing import NamedTuple

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane_copies import Copy, CopyStrides
from kvpatch.geometry.segments import Segments
from kvpatch.geometry.tensor_facts import extent_bytes


class Reach(NamedTuple):
    """How far segments go on one side: past the last block, past the last token of a block."""

    side: str
    lowest: int
    end_block: int
    end_token: int
    last_offset: int
    least_tokens: int


def reach_of(segments: Segments) -> tuple[Reach, Reach]:
    """(remote, local).

    Raises:
        UnplannableCopy: a segment has no tokens.
    """
    if int(segments.tokens.min()) < 1:
        raise UnplannableCopy(
            f"expected segments of 1 token or more, found {int(segments.tokens.min())}"
        )
    sides = (
        ("remote", segments.remote_block, segments.remote_offset),
        ("local", segments.local_block, segments.local_offset),
    )
    theirs, ours = (
        Reach(
            side,
            min(int(block.min()), int(offset.min())),
            int(block.max()) + 1,
            int((offset + segments.tokens).max()),
            int(offset.max()),
            int(segments.tokens.min()),
        )
        for side, block, offset in sides
    )
    return theirs, ours


def check_reach(reach: tuple[Reach, Reach], copy: Copy) -> None:
    for side, plane in zip(reach, (copy.remote, copy.local), strict=True):
        if plane.is_whole and (side.last_offset or side.least_tokens < plane.counts.block_tokens):
            raise UnplannableCopy(
                f"expected whole blocks of {plane}, found segments of {side.least_tokens} tokens "
                f"or more, up to token {side.last_offset} of a block"
            )
        if (
            side.lowest < 0
            or side.end_block > plane.counts.blocks
            or side.end_token > plane.counts.block_tokens
        ):
            raise UnplannableCopy(
                f"expected {side.side} segments inside {plane}, found blocks up to "
                f"{side.end_block - 1}, tokens up to {side.end_token - 1} in a block, "
                f"and {side.lowest} as the lowest number"
            )


def local_end(reach: Reach, address: int, strides: CopyStrides) -> int:
    """The address past the last byte that segments of such reach write to, from an address on."""
    sizes = ((reach.end_block, strides.block), (reach.end_token, strides.token))
    axes = [(size, axis.local_stride) for size, axis in sizes]
    axes += [(axis.size, axis.local_stride) for axis in strides.inner]
    return address + extent_bytes(axes, strides.item_bytes)
