"""Digests of cached tokens: their definition, and how surely they notice that bytes are wrong.

P's worker makes them when a request is over, and D's of what it has loaded, before it reports it.
They are compared by place, and written as bytes that a peer reads. ``cache_digests.py`` makes them
of tensors.

A digest is made in two sums. All numbers are whole and of 64 bits, and what goes beyond is
dropped, so that no order of adding matters.

1. A *row* is a token of one head, in keys or in values: its channels' bytes in the order of the
   channels, as signed words of 32 bits, whatever the data type and wherever a layout puts them. The
   row's sum is that of each word times the weight of the word's place.
2. A *cell* is the rows of one layer, content and head in a range of tokens. Each row's sum is cut
   into two halves of 32 bits, the upper one signed; the cell's sum is that of both times their
   weights, which belong to the token's position in the request.
Weights are odd and drawn by SHAKE-256 from a seed that both sides know, and from positions in the
row and in the prompt: never from addresses, blocks or ranks. So layouts, block sizes and ranks
come to the same sums. Sums of cells over parts of a range add up to the range's.

**How surely.** Let the bytes differ in any way that does not depend on the seed.

- *One step.* Take two unlike lists of words of 32 bits, and weights that are drawn for them. Let
  2**v be the highest power of two that divides every difference between them: v is at most 31. One
  word differs by an odd multiple of 2**v. Whatever the other weights are, the sums are equal only
  if this word's weight has one certain value in its lowest 64 - v bits. One of these bits is known,
  as weights are odd, and the others are drawn: a chance of 1 in 2**(63 - v), 2**-32 at most. If no
  other word differs the sums are never equal, since odd times a difference below 2**32 is no
  multiple of 2**64.
- *Two steps.* For wrong bytes to be missed, all wrong rows of a cell have to come to their right
  sums, or those that do not have to come to the right sum of the cell. Each step has weights of its
  own, so each has a chance of at most 2**-32: together below 2 in 2**32, once in 2.1 billion loads
  *that are wrong*, whatever was wrong with them.
- *Usually* far less: in stale data the lowest bit of some word differs, and then the first step's
  chance is 2**-63. The bound is reached by errors like the signs of many ``float32`` values alone.
  A row with one wrong word, thus one with a single wrong bit, has a wrong sum for certain.

Nothing has to be assumed about errors that "cancel": swapped blocks, heads or layers, keys for
values, values twice as large and shifts by a token are unlike lists of words like all others, and
two errors cancel with the chance above. That is why words are multiplied and not mixed otherwise.
What it rests on is that SHAKE-256's numbers are as good as drawn ones, and that errors do not
follow the seed: a new one for each request also keeps a repeated error from being missed twice.

**What it does not notice.** Bytes outside the tokens that it covers. What was wrong before P's
digest, or goes wrong behind D's. Whoever wants to deceive: who knows the seed can find other bytes
of one sum. Bytes in another place that are the same bytes, which are no error. And it alarms where
bytes differ and values do not, as 0.0 and -0.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpatch.core.errors import DigestsRefused
from kvpatch.geometry.plane import Content, HeadName

UInt64Array = npt.NDArray[np.uint64]

WORD_BYTES = 4
#: A longer row, a recurrent state, is cut into rows of so many words.
ROW_WORDS = 1024
_DRAWN_AT_ONCE = 64
HALF_BITS = 32
LOW_HALF = 2**32 - 1


def rows_of(row_bytes: int) -> tuple[int, int]:
    """(rows that a token's channels of one head are cut into, words of each), rounded up."""
    words = -(-row_bytes // WORD_BYTES)
    return (1, words) if words <= ROW_WORDS else (-(-words // ROW_WORDS), ROW_WORDS)


class Weights:
    """The weights of one request, or of all requests that share a seed.

    Args:
        seed: a value that both sides know, for example a request's id.
    """

    def __init__(self, seed: bytes) -> None:
        self.seed = seed

    def words(self, count: int) -> UInt64Array:
        """[word] of a row."""
        return self._drawn("word", 0, count)

    def rows(self, first: int, end: int) -> UInt64Array:
        """[half, row] of rows from one to another; a token has as many as :func:`rows_of` says."""
        halves: UInt64Array = self._drawn("row", 2 * first, 2 * end).reshape(-1, 2).T
        return halves

    def _drawn(self, what: str, first: int, end: int) -> UInt64Array:
        """Odd numbers by their place in a series, the same wherever a part of it begins."""
        lots = range(first // _DRAWN_AT_ONCE, -(-end // _DRAWN_AT_ONCE))
        raw = b"".join(
            # As Python writes them down, no two unlike ones look alike.
            shake_256(repr((self.seed, what, lot)).encode()).digest(8 * _DRAWN_AT_ONCE)
            for lot in lots
        )
        numbers: UInt64Array = np.frombuffer(raw, "<u8").astype(np.uint64) | np.uint64(1)
        return numbers[first - lots.start * _DRAWN_AT_ONCE :][: end - first]


#: The first token, and the one past the last.
Extent = tuple[int, int]


class Place(NamedTuple):
    """The subject of a digest: heads of a layer's content, in a range of tokens."""

    layer: str
    content: Content
    heads: tuple[int, ...]
    first_token: int
    end_token: int

    def __str__(self) -> str:
        if self.content is Content.STATE:
            return f"layer {self.layer!r}, its recurrent state"
        heads = ", ".join(map(str, self.heads))
        return (
            f"layer {self.layer!r}, {self.content.value} of heads {heads}, tokens "
            f"{self.first_token} to {self.end_token - 1}"
        )


class Comparison(NamedTuple):
    """The result of a comparison of two digests, over what both of them contain.

    Attributes:
        unchecked: what the other side's digest does not cover, or not in the same ranges.
        checked: cells that were compared.
    """

    wrong: tuple[Place, ...]
    unchecked: tuple[Place, ...]
    checked: int


@dataclass(frozen=True, eq=False)
class Digests:
    """Sums of cells.

    Attributes:
        ranges: of tokens, in order.
        heads: one row of cells each. Contents without heads have head 0; what each rank has one
            of its own of is told apart by a number in its place.
        sums: [head, range].
    """

    seed: bytes
    ranges: tuple[Extent, ...]
    heads: tuple[HeadName, ...]
    sums: UInt64Array


def ranges_of(first_token: int, end_token: int, range_tokens: int) -> tuple[Extent, ...]:
    """Cuts tokens at the multiples of ``range_tokens``, so that both sides cut alike."""
    borders = [*range(first_token - first_token % range_tokens, end_token, range_tokens), end_token]
    cut = [(max(start, first_token), end) for start, end in zip(borders, borders[1:], strict=False)]
    return tuple((start, end) for start, end in cut if start < end)


def compare(theirs: Digests, ours: Digests) -> Comparison:
    """Compares two digests: finds what differs, and which local parts the peer's does not cover.

    Raises:
        DigestsRefused: seeds are unlike.
    """
    if theirs.seed != ours.seed:
        raise DigestsRefused(
            f"expected digests of the same seeds, found {theirs.seed!r} and {ours.seed!r}"
        )
    rows, their_rows = _common(ours.heads, theirs.heads)
    columns, their_columns = _common(ours.ranges, theirs.ranges)
    is_known = np.zeros(ours.sums.shape, dtype=bool)
    is_known[np.ix_(rows, columns)] = True
    expected = ours.sums.copy()
    expected[np.ix_(rows, columns)] = theirs.sums[np.ix_(their_rows, their_columns)]
    return Comparison(
        _places(ours, expected != ours.sums), _places(ours, ~is_known), int(is_known.sum())
    )


def _common(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Returns where the things stand that are in both sequences."""
    at = {one: number for number, one in enumerate(theirs)}
    found = [number for number, one in enumerate(ours) if one in at]
    return found, [at[ours[number]] for number in found]


def _places(digests: Digests, chosen: npt.NDArray[np.bool_]) -> tuple[Place, ...]:
    """Cells as few places: heads of one range together, and then ranges behind one another."""
    by_range: dict[tuple[str, str, Extent], list[HeadName]] = {}
    for row, column in np.argwhere(chosen).tolist():
        head = digests.heads[row]
        by_range.setdefault((head[0], head[1].value, digests.ranges[column]), []).append(head)
    found: list[Place] = []
    for (layer, _, (start, end)), heads in sorted(by_range.items()):
        place = Place(layer, heads[0][1], tuple(sorted(head for *_, head in heads)), start, end)
        before = found[-1] if found else place
        if before == place._replace(first_token=before.first_token, end_token=start):
            found[-1] = before._replace(end_token=end)
        else:
            found.append(place)
    return tuple(found)


_LENGTH_BYTES = 8
_CELL_BYTES = 8
_FORM = 1

#: The smallest block that engines use: where a prefix hit of D's ends, a range ends too.
_SMALLEST_TOKENS = 16
#: A sample is one run of ranges from each of so many lots.
_LOTS = 8
#: Of the ranges of a lot.
_SHARE = 8


def range_tokens_of(tokens: int, cells: int, most_cells: int) -> int:
    """The smallest ranges with which a digest of some tokens has room.

    Args:
        cells: of one range: heads, over all layers and contents.
        most_cells: of the digest.
    """
    size = _SMALLEST_TOKENS
    while size < tokens and cells * -(-tokens // size) > most_cells:
        size *= 2
    return size


def extents_of(
    first_token: int, end_token: int, range_tokens: int, seed: bytes, *, is_sample: bool
) -> tuple[Extent, ...]:
    """Runs of whole ranges, of all tokens or of a sample of them.

    A sample has a part from everywhere, drawn by the seed: who has the seed draws the same. It
    counts ranges from the request's first token on, whichever of its tokens are asked for.

    Args:
        end_token: of the request.
    """
    if not is_sample:
        return ((first_token, end_token),) if first_token < end_token else ()
    ranges = -(-end_token // range_tokens)
    found: list[Extent] = []
    lots = min(_LOTS, ranges)
    for lot in range(lots):
        begins, ends = ranges * lot // lots, ranges * (lot + 1) // lots
        taken = -(-(ends - begins) // _SHARE)
        drawn = int.from_bytes(shake_256(repr((seed, "sample", lot)).encode()).digest(8), "little")
        start = begins + drawn % (ends - begins - taken + 1)
        extent = start * range_tokens, min((start + taken) * range_tokens, end_token)
        if extent[0] >= first_token:
            found.append(extent)
    return joined(found)


def joined(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Joins the extents that follow one another."""
    found: list[Extent] = []
    for start, end in extents:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)


class Stated(NamedTuple):
    """Digests of one block table, the tokens of its ranges, and whether these are a sample."""

    range_tokens: int
    digests: Digests
    is_sample: bool = False


def written(parts: Sequence[Stated]) -> bytes:
    """Encodes the digests that a rank states of a request: one part for each block table."""
    told = [
        {
            "range": part.range_tokens,
            "sample": part.is_sample,
            "ranges": part.digests.ranges,
            "cells": [
                (layer, content.value, [head for *_, head in heads])
                for (layer, content), heads in groupby(part.digests.heads, lambda name: name[:2])
            ],
        }
        for part in parts
    ]
    head = json.dumps({"form": _FORM, "parts": told}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _CELL_BYTES)
    raw = b"".join(part.digests.sums.astype("<u8").tobytes() for part in parts)
    return len(head).to_bytes(_LENGTH_BYTES, "little") + head + raw


def read(raw: bytes, seed: bytes) -> tuple[Stated, ...]:
    """The digests that a peer has written.

    Raises:
        DigestsRefused: they are none, or of a newer form.
    """
    end = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    try:
        told = json.loads(raw[_LENGTH_BYTES:end])
        if told["form"] != _FORM:
            raise DigestsRefused(f"expected digests of form {_FORM}, found {told['form']!r}")
        sums, found = np.frombuffer(raw[end:], "<u8").astype(np.uint64), []
        for part in told["parts"]:
            heads = tuple(
                (str(layer), Content(content), int(head))
                for layer, content, heads in part["cells"]
                for head in heads
            )
            ranges = _in_order(part["ranges"])
            size = len(heads) * len(ranges)
            digests = Digests(seed, ranges, heads, sums[:size].reshape(len(heads), len(ranges)))
            found.append(Stated(int(part["range"]), digests, bool(part["sample"])))
            sums = sums[size:]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DigestsRefused(f"expected a peer's digests, found other bytes: {error!r}") from error
    if sums.size or not all(part.range_tokens > 0 for part in found):
        raise DigestsRefused(f"expected no more sums in a peer's digests, found {sums.size}")
    return tuple(found)


def _in_order(told: Iterable[Any]) -> tuple[Extent, ...]:
    """Reads ranges in order; refuses others, which could name tokens many times."""
    ranges = tuple((int(first), int(last)) for first, last in told)
    ends = [0, *(last for _, last in ranges)]
    for end, extent in zip(ends, ranges, strict=False):
        if not end <= extent[0] < extent[1]:
            raise DigestsRefused(f"expected ranges of tokens in order, found {extent} behind {end}")
    return ranges


def within(theirs: Stated, extent: Extent) -> tuple[Extent, ...]:
    """Returns the peer's ranges that lie within some tokens."""
    return tuple(
        (start, end)
        for start, end in theirs.digests.ranges
        if extent[0] <= start < end <= extent[1]
    )
