"""Where planes of two engines overlap: by layer, content and global head.

What overlaps is copied; how that copy is strided on both sides, without saying which
tokens it takes, is a :class:`Copy`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane import Content, Plane


class CopyAxis(NamedTuple):
    """``size`` steps of so many bytes on each side."""

    size: int
    remote_stride: int
    local_stride: int


class CopyStrides(NamedTuple):
    """How a copy is strided on both sides, without saying where: what layers share.

    ``block`` and ``token`` are stepped by segments; ``inner`` (heads, channels, and keys
    and values where they are copied together) is walked whole.
    """

    item_bytes: int
    block: CopyAxis
    token: CopyAxis
    inner: tuple[CopyAxis, ...]


@dataclass(frozen=True)
class Copy:
    """From one remote to one local plane, or a pair of them, within a range of heads."""

    remote: Plane
    local: Plane
    remote_address: int
    local_address: int
    strides: CopyStrides


def missing_heads(
    remote_planes: Sequence[Plane], local_planes: Sequence[Plane]
) -> tuple[tuple[str, Content, int], ...]:
    """(layer, content, global head) of local planes that no remote plane holds."""
    held = _by_content(remote_planes)
    return tuple(
        (local.layer, local.content, head)
        for local in local_planes
        for start, end, remote in _head_ranges(local, held[local.layer, local.content])
        if remote is None
        for head in range(start, end)
    )


def _by_content(planes: Sequence[Plane]) -> defaultdict[tuple[str, Content], list[Plane]]:
    found: defaultdict[tuple[str, Content], list[Plane]] = defaultdict(list)
    for plane in planes:
        found[plane.layer, plane.content].append(plane)
    return found


def _head_ranges(
    local: Plane, candidates: Sequence[Plane]
) -> Iterator[tuple[int, int, Plane | None]]:
    """The local plane's heads in order as (start, end, the remote plane that holds them)."""
    head = local.first_head
    while head < local.end_head:
        holder = next(
            (plane for plane in candidates if plane.first_head <= head < plane.end_head), None
        )
        if holder is None:
            later = [plane.first_head for plane in candidates if plane.first_head > head]
            end = min([local.end_head, *later])
        else:
            end = min(local.end_head, holder.end_head)
        yield head, end, holder
        head = end


def copies_between(remote_planes: Sequence[Plane], local_planes: Sequence[Plane]) -> list[Copy]:
    """Every overlap of two planes; keys and values of one layer as one where they can be."""
    held = _by_content(remote_planes)
    copies: list[Copy] = []
    for local in local_planes:
        for start, end, remote in _head_ranges(local, held[local.layer, local.content]):
            if remote is None:
                continue
            copy = _copy(remote, local, start, end)
            fused = _fused(copies[-1], copy) if copies else None
            if fused is not None:
                copies[-1] = fused
            else:
                copies.append(copy)
    return copies


def _copy(remote: Plane, local: Plane, start_head: int, end_head: int) -> Copy:
    if remote.item_bytes != local.item_bytes or remote.counts.channels != local.counts.channels:
        raise UnplannableCopy(
            f"expected planes of one width and item size, found {remote} and {local}"
        )
    if remote.is_whole or local.is_whole:
        check_whole(remote, local)
    theirs, ours = remote.strides_bytes, local.strides_bytes
    return Copy(
        remote,
        local,
        remote.address + (start_head - remote.first_head) * theirs.head,
        local.address + (start_head - local.first_head) * ours.head,
        CopyStrides(
            item_bytes=local.item_bytes,
            block=CopyAxis(local.counts.blocks, theirs.block, ours.block),
            token=CopyAxis(local.counts.block_tokens, theirs.token, ours.token),
            inner=(
                CopyAxis(local.counts.channels, theirs.channel, ours.channel),
                CopyAxis(end_head - start_head, theirs.head, ours.head),
            ),
        ),
    )


def check_whole(remote: Plane, local: Plane) -> None:
    """Whether a block of one plane is a block of the other, byte for byte.

    Heads that lie outside the tokens may be any bytes apart.

    Raises:
        UnplannableCopy: it is not.
    """
    if (
        remote.is_whole != local.is_whole
        or remote.counts[1:] != local.counts[1:]
        or remote.first_head != local.first_head
        or _inside_block(remote) != _inside_block(local)
    ):
        raise UnplannableCopy(
            f"expected blocks that move whole to be alike on both sides, found {remote} and {local}"
        )


def _inside_block(plane: Plane) -> tuple[int | None, ...]:
    """(head, token, channel) strides; None where they do not tell how bytes lie."""
    strides, counts = plane.strides_bytes, plane.counts
    is_outside = strides.head >= counts.block_tokens * strides.token
    return (
        None if counts.heads == 1 or is_outside else strides.head,
        strides.token if counts.block_tokens > 1 else None,
        strides.channel if counts.channels > 1 else None,
    )


def _fused(keys: Copy, values: Copy) -> Copy | None:
    """Both as one copy where they lie alike on each side; None where they do not.

    Without this, packed caches of one layout would be copied a row at a time. Values
    before their keys are left apart: walked in turns, a block's values and the next
    block's keys could merge into a run across two registrations.
    """
    pair = (keys.local.content, values.local.content)
    if pair != (Content.KEY, Content.VALUE) or keys.local.layer != values.local.layer:
        return None
    ours, theirs = keys.strides, values.strides
    apart = (
        values.remote_address - keys.remote_address,
        values.local_address - keys.local_address,
    )
    if min(apart) <= 0 or ours._replace(inner=()) != theirs._replace(inner=()):
        return None
    if keys.remote.counts[::2] != values.remote.counts[::2] or len(ours.inner) > 2:
        return None  # other blocks or block_tokens: each needs a check of its own
    (channel, head), (value_channel, value_head) = ours.inner, theirs.inner
    if head != value_head or channel[1:] != value_channel[1:]:
        return None
    item = ours.item_bytes
    row = channel.size * item
    if apart == (row, row) and channel[1:] == (item, item):
        wide = channel._replace(size=channel.size + value_channel.size)
        return replace(keys, strides=ours._replace(inner=(wide, head)))
    if channel.size != value_channel.size:
        return None
    return replace(keys, strides=ours._replace(inner=(channel, head, CopyAxis(2, *apart))))


def contiguous(
    strides: CopyStrides, tokens: int, inner: Sequence[CopyAxis] | None = None
) -> tuple[int, list[CopyAxis]]:
    """(bytes that are contiguous on both sides, the axes that step from run to run).

    Of one segment of so many tokens; ``inner`` is all of the copy's inner axes unless
    some are walked outside.
    """
    length = strides.item_bytes
    axes = [*(strides.inner if inner is None else inner), strides.token._replace(size=tokens)]
    left = [axis for axis in axes if axis.size > 1]
    while True:
        grown = next((axis for axis in left if axis[1:] == (length, length)), None)
        if grown is None:
            return length, left
        length *= grown.size
        left.remove(grown)


def contiguous_bytes(strides: CopyStrides, tokens: int) -> int:
    """Bytes of one run of a segment of so many tokens."""
    return contiguous(strides, tokens)[0]
