"""Segments of tokens by the tiles that they lie in, for copies of which a side is tiled.

Inside a tile tokens lie in steps of their own. Whole tiles are stepped over as tokens are
elsewhere, with the tokens of each as one more axis; what begins or ends inside a tile is a part of
its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvpatch.geometry.plane_copies import Copy, CopyAxis, CopyStrides, CopyTile, moved
from kvpatch.geometry.segments import Int64Array, Segments


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
        yield (
            part.segments,
            moved(
                copy,
                part.remote_first * tile.remote_step,
                part.local_first * tile.local_step,
                strides_of(copy.strides, tile, part.tokens),
            ),
        )


def strides_of(strides: CopyStrides, tile: CopyTile, tokens: int) -> CopyStrides:
    """How so many tokens of each tile are strided, where segments count tiles."""
    inside = CopyAxis(tokens, tile.remote_step, tile.local_step)
    return strides._replace(inner=(*strides.inner, inside), tile=None)


def parts_in_tiles(segments: Segments, tile: CopyTile) -> tuple[TilePart, ...]:
    key = tile.tokens, tile.is_remote, tile.is_local
    found: tuple[TilePart, ...] | None = segments.kept.get(key)
    if found is None:
        found = segments.kept[key] = tuple(_parts(segments, tile))
    return found


class _Pieces(NamedTuple):
    """``number`` of the segment, first token in it, tokens in each tile, and tiles."""

    number: Int64Array
    first: Int64Array
    tokens: Int64Array
    tiles: Int64Array


def _parts(segments: Segments, tile: CopyTile) -> Iterator[TilePart]:
    size = tile.tokens
    pieces = _pieces(segments, tile)
    remote = segments.remote_offset[pieces.number] + pieces.first
    local = segments.local_offset[pieces.number] + pieces.first
    codes = (remote % size * size + local % size) * (size + 1) + pieces.tokens
    for code in np.unique(codes).tolist():
        rows = codes == code
        number = pieces.number[rows]
        places, tokens = divmod(code, size + 1)
        remote_first, local_first = divmod(places, size)
        yield TilePart(
            Segments(
                segments.remote_block[number],
                remote[rows] // size,
                segments.local_block[number],
                local[rows] // size,
                pieces.tiles[rows],
            ),
            remote_first,
            local_first,
            tokens,
        )


def _pieces(segments: Segments, tile: CopyTile) -> _Pieces:
    """Splits segments into the part before the first whole tile, the whole tiles, and the rest."""
    size, tokens = tile.tokens, segments.tokens
    offset = segments.local_offset if tile.is_local else segments.remote_offset
    # Where both sides are tiled, and not in step, no token has its neighbour beside it on both.
    apart = (segments.remote_offset - segments.local_offset) % size != 0
    is_askew = apart & (tile.is_remote and tile.is_local)
    even = np.flatnonzero(~is_askew)
    before = np.minimum(-offset % size, tokens)
    tiles, behind = np.divmod(tokens - before, size)
    one = np.ones_like(even)
    askew = np.flatnonzero(is_askew)
    alone = np.repeat(askew, tokens[askew])
    counted = np.arange(alone.size) - np.repeat(
        np.cumsum(tokens[askew]) - tokens[askew], tokens[askew]
    )
    found = (
        _Pieces(even, np.zeros_like(even), before[even], one),
        _Pieces(even, before[even], np.full_like(even, size), tiles[even]),
        _Pieces(even, (before + tiles * size)[even], behind[even], one),
        _Pieces(alone, counted, np.ones_like(alone), np.ones_like(alone)),
    )
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    kept = (columns[2] > 0) & (columns[3] > 0)
    return _Pieces(*(column[kept] for column in columns))
