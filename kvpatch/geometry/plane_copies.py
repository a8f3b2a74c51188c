"""The overlap of two engines' planes: by layer, content and global head.

What overlaps is copied; how that copy is strided on both sides, without saying which
tokens it takes, is a :class:`Copy`. Segments say which; they have to stay inside the planes.

Inside a tile tokens lie in steps of their own. Segments of a tiled copy are therefore cut by tiles:
whole ones are stepped over as tokens are elsewhere, with the tokens of each as one more axis, and
what begins or ends inside a tile is a part of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane import Content, Plane, extent_bytes
from kvpatch.geometry.segments import Int64Array, Segments


class CopyAxis(NamedTuple):
    """``size`` steps of so many bytes on each side."""

    size: int
    remote_stride: int
    local_stride: int


class CopyTile(NamedTuple):
    """The order of tokens inside a tile, for a copy of which one side or both are tiled.

    The side that is not tiled is stepped through in as many tokens.

    Attributes:
        tokens: the tokens of a tile.
        remote_step, local_step: bytes from one token to the next.
        is_remote, is_local: True if that side is tiled.
    """

    tokens: int
    remote_step: int
    local_step: int
    is_remote: bool
    is_local: bool


class CopyStrides(NamedTuple):
    """The strides of a copy on both sides, without its addresses: layers share them.

    ``block`` and ``token`` are stepped by segments; ``inner`` (heads, channels, and keys
    and values where they are copied together) is walked whole. Where there is a ``tile``, ``token``
    steps from tile to tile, and segments have to be cut before they are used.
    """

    item_bytes: int
    block: CopyAxis
    token: CopyAxis
    inner: tuple[CopyAxis, ...]
    tile: CopyTile | None = None


@dataclass(frozen=True)
class Copy:
    """A copy from one remote to one local plane, or a pair of them, within a range of heads."""

    remote: Plane
    local: Plane
    remote_address: int
    local_address: int
    strides: CopyStrides


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
    token, *inside = _axes(remote, local, "token")
    return Copy(
        remote,
        local,
        remote.address + (start_head - remote.first_head) * theirs.head,
        local.address + (start_head - local.first_head) * ours.head,
        CopyStrides(
            item_bytes=local.item_bytes,
            block=CopyAxis(local.counts.blocks, theirs.block, ours.block),
            token=token,
            inner=(
                *_axes(remote, local, "channel"),
                CopyAxis(end_head - start_head, theirs.head, ours.head),
            ),
            tile=CopyTile(*inside[0], remote.tile is not None, local.tile is not None)
            if inside
            else None,
        ),
    )


def _axes(remote: Plane, local: Plane, name: Literal["token", "channel"]) -> tuple[CopyAxis, ...]:
    """One axis; where a side is tiled, that from tile to tile and that inside one."""
    count = local.counts.channels if name == "channel" else local.counts.block_tokens
    sides = [(getattr(plane.strides_bytes, name), plane.tile) for plane in (remote, local)]
    sizes = {getattr(tile, f"{name}s") for _, tile in sides if tile is not None}
    if not sizes:
        return (CopyAxis(count, *(stride for stride, _ in sides)),)
    if len(sizes) > 1:
        raise UnplannableCopy(f"expected tiles of one size, found {remote} and {local}")
    (size,) = sizes
    steps = [
        (size * stride, stride) if tile is None else (stride, getattr(tile, f"{name}_step"))
        for stride, tile in sides
    ]
    outer, inner = zip(*steps, strict=True)
    return CopyAxis(-(-count // size), *outer), CopyAxis(size, *inner)


def check_whole(remote: Plane, local: Plane) -> None:
    """Refuses planes of which a block of one is not a block of the other, byte for byte.

    Heads that lie outside the tokens may be any bytes apart.

    Raises:
        UnplannableCopy: blocks are unlike.
    """
    if (
        remote.is_whole != local.is_whole
        or remote.counts[1:] != local.counts[1:]
        or remote.first_head != local.first_head
        or remote.tile != local.tile
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
    """Joins two copies where they lie alike on each side; None where they do not.

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
    if ours.tile is not None:
        return None  # of keys and of values tiles are unlike
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
    """Returns the bytes of one run of a segment of so many tokens, or of its whole tiles."""
    tile = strides.tile
    if tile is None:
        return contiguous(strides, tokens)[0]
    inside = CopyAxis(min(tokens, tile.tokens), tile.remote_step, tile.local_step)
    inner = (*strides.inner, inside)
    return contiguous(strides, max(1, tokens // tile.tokens), inner)[0]


class Reach(NamedTuple):
    """The reach of segments on one side: past the last block, past the last token of a block."""

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
    least_tokens = int(segments.tokens.min())
    if least_tokens < 1:
        raise UnplannableCopy(f"expected segments of 1 token or more, found {least_tokens}")
    theirs, ours = (
        Reach(
            side,
            min(int(block.min()), int(offset.min())),
            int(block.max()) + 1,
            int((offset + segments.tokens).max()),
            int(offset.max()),
            least_tokens,
        )
        for side, block, offset in (
            ("remote", segments.remote_block, segments.remote_offset),
            ("local", segments.local_block, segments.local_offset),
        )
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


class TilePart(NamedTuple):
    """Tokens that begin at one place of their tiles on each side, and as many in each tile.

    Attributes:
        segments: their offsets and tokens count tiles.
        remote_first, local_first: the token of a tile that they begin with.
        tokens: in each tile.
    """

    segments: Segments
    remote_first: int
    local_first: int
    tokens: int


def copies_in_tiles(segments: Segments, copy: Copy) -> Iterator[tuple[Segments, Copy]]:
    """The same tokens by copies that no side tiles, each of its own segments.

    Segments that are the same for two copies are one object for both.
    """
    tile = copy.strides.tile
    if tile is None:
        yield segments, copy
        return
    for part in parts_in_tiles(segments, tile):
        inside = CopyAxis(part.tokens, tile.remote_step, tile.local_step)
        yield (
            part.segments,
            replace(
                copy,
                remote_address=copy.remote_address + part.remote_first * tile.remote_step,
                local_address=copy.local_address + part.local_first * tile.local_step,
                strides=copy.strides._replace(inner=(*copy.strides.inner, inside), tile=None),
            ),
        )


def parts_in_tiles(segments: Segments, tile: CopyTile) -> tuple[TilePart, ...]:
    key = tile.tokens, tile.is_remote, tile.is_local
    found: tuple[TilePart, ...] | None = segments.kept.get(key)
    if found is None:
        found = segments.kept[key] = tuple(_parts(segments, tile))
    return found


def _parts(segments: Segments, tile: CopyTile) -> Iterator[TilePart]:
    size = tile.tokens
    number, first, tokens, tiles = _pieces(segments, tile)
    remote = segments.remote_offset[number] + first
    local = segments.local_offset[number] + first
    codes = (remote % size * size + local % size) * (size + 1) + tokens
    for code in np.unique(codes).tolist():
        rows = codes == code
        places, in_each = divmod(code, size + 1)
        remote_first, local_first = divmod(places, size)
        yield TilePart(
            Segments(
                segments.remote_block[number[rows]],
                remote[rows] // size,
                segments.local_block[number[rows]],
                local[rows] // size,
                tiles[rows],
            ),
            remote_first,
            local_first,
            in_each,
        )


def _pieces(segments: Segments, tile: CopyTile) -> Iterator[Int64Array]:
    """Splits segments into the part before the first whole tile, the whole tiles, and the rest.

    Yields of all pieces the number of the segment, the first token in it, tokens in each tile, and
    tiles.
    """
    size, tokens = tile.tokens, segments.tokens
    offset = segments.local_offset if tile.is_local else segments.remote_offset
    # Where both sides are tiled, and not in step, no token has its neighbour beside it on both.
    apart = (segments.remote_offset - segments.local_offset) % size != 0
    is_askew = apart & (tile.is_remote and tile.is_local)
    even, askew = np.flatnonzero(~is_askew), np.flatnonzero(is_askew)
    before = np.minimum(-offset % size, tokens)
    tiles, behind = np.divmod(tokens - before, size)
    one = np.ones_like(even)
    alone = np.repeat(askew, tokens[askew])
    ahead = np.cumsum(tokens[askew]) - tokens[askew]
    found = (
        (even, np.zeros_like(even), before[even], one),
        (even, before[even], np.full_like(even, size), tiles[even]),
        (even, (before + tiles * size)[even], behind[even], one),
        (
            alone,
            np.arange(alone.size) - np.repeat(ahead, tokens[askew]),
            np.ones_like(alone),
            np.ones_like(alone),
        ),
    )
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    kept = (columns[2] > 0) & (columns[3] > 0)
    return (column[kept] for column in columns)
