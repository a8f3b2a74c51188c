"""Digests of a request's cached tokens: joined, compared by place, and as bytes that a peer reads.

The numbers are described in ``digest_weights.py``; ``cache_digests.py`` makes them of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_256
from typing import Any, NamedTuple

import numpy as np

from kvpatch.checks.digests.digest_weights import UInt64Array
from kvpatch.core.errors import DigestsRefused
from kvpatch.geometry.plane import Content

#: A layer, and which of its contents.
Name = tuple[str, Content]
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
        wrong: where bytes differ.
        unchecked: what the other side's digest does not cover, or not in the same ranges.
        checked: cells that were compared.
    """

    wrong: tuple[Place, ...]
    unchecked: tuple[Place, ...]
    checked: int

    @property
    def proves(self) -> bool:
        """True if all of ours was compared, and is theirs: nothing less is a load verified."""
        return self.checked > 0 and not self.wrong and not self.unchecked


@dataclass(frozen=True)
class Digests:
    """Sums of cells.

    Attributes:
        seed: of their weights.
        ranges: of tokens, in order.
        cells: [range] by global head, of each layer's contents. Contents without heads have
            head 0; what each rank has one of its own of is told apart by a number in its place.
    """

    seed: bytes
    ranges: tuple[Extent, ...]
    cells: Mapping[Name, Mapping[int, UInt64Array]]


def ranges_of(first_token: int, end_token: int, range_tokens: int) -> tuple[Extent, ...]:
    """Cuts tokens at the multiples of ``range_tokens``, so that both sides cut alike."""
    borders = [*range(first_token - first_token % range_tokens, end_token, range_tokens), end_token]
    cut = [(max(start, first_token), end) for start, end in zip(borders, borders[1:], strict=False)]
    return tuple((start, end) for start, end in cut if start < end)


def of_all_ranges(parts: Sequence[Digests]) -> Digests:
    """Digests of the same cells in other ranges, which stay apart.

    Raises:
        DigestsRefused: they overlap, or seeds or cells are unlike.
    """
    ordered = sorted(parts, key=lambda part: part.ranges[0])
    _check_alike("seeds", [part.seed for part in ordered])
    _check_alike("cells", [{name: set(of) for name, of in part.cells.items()} for part in ordered])
    ranges = [extent for part in ordered for extent in part.ranges]
    for before, after in zip(ranges, ranges[1:], strict=False):
        if after[0] < before[1]:
            raise DigestsRefused(f"expected ranges that do not overlap, found {before} and {after}")
    first = ordered[0]
    cells = {
        name: {head: np.concatenate([part.cells[name][head] for part in ordered]) for head in heads}
        for name, heads in first.cells.items()
    }
    return replace(first, ranges=tuple(ranges), cells=cells)


def compare(theirs: Digests, ours: Digests) -> Comparison:
    """Compares two digests: finds what differs, and which local parts the peer's does not cover.

    Raises:
        DigestsRefused: seeds are unlike.
    """
    _check_alike("seeds", [theirs.seed, ours.seed])
    is_same = theirs.ranges == ours.ranges
    columns = {extent: at for at, extent in enumerate(theirs.ranges)}
    wrong: list[tuple[Name, int, Extent]] = []
    unchecked: list[tuple[Name, int, Extent]] = []
    checked = 0
    for name, heads in ours.cells.items():
        for head, sums in heads.items():
            expected = theirs.cells.get(name, {}).get(head)
            if is_same and expected is not None and np.array_equal(expected, sums):
                checked += sums.size  # what nearly all are
                continue
            for extent, found in zip(ours.ranges, sums.tolist(), strict=True):
                if expected is None or extent not in columns:
                    unchecked.append((name, head, extent))
                    continue
                checked += 1
                if int(expected[columns[extent]]) != found:
                    wrong.append((name, head, extent))
    return Comparison(_places(wrong), _places(unchecked), checked)


def _places(cells: Iterable[tuple[Name, int, Extent]]) -> tuple[Place, ...]:
    """Cells as few places: heads of one range together, and then ranges behind one another."""
    by_range: dict[tuple[Name, Extent], list[int]] = {}
    for name, head, extent in cells:
        by_range.setdefault((name, extent), []).append(head)
    found: list[Place] = []
    for ((layer, content), (start, end)), heads in sorted(
        by_range.items(), key=lambda item: (item[0][0][0], item[0][0][1].value, item[0][1])
    ):
        place = Place(layer, content, tuple(sorted(heads)), start, end)
        before = found[-1] if found else place
        if before == place._replace(first_token=before.first_token, end_token=start):
            found[-1] = before._replace(end_token=end)
        else:
            found.append(place)
    return tuple(found)


def _check_alike(what: str, found: Sequence[object]) -> None:
    """Refuses what is not all the same.

    Raises:
        DigestsRefused: they are not.
    """
    other = next((one for one in found if one != found[0]), None)
    if other is not None:
        raise DigestsRefused(
            f"expected digests of the same {what}, found {found[0]!r} and {other!r}"
        )


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


def joined(extents: Sequence[Extent]) -> tuple[Extent, ...]:
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
                (layer, content.value, list(heads))
                for (layer, content), heads in part.digests.cells.items()
            ],
        }
        for part in parts
    ]
    head = json.dumps({"form": _FORM, "parts": told}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _CELL_BYTES)
    sums = [s for part in parts for of in part.digests.cells.values() for s in of.values()]
    raw = np.concatenate(sums).astype("<u8").tobytes() if sums else b""
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
        sums = np.frombuffer(raw[end:], "<u8").astype(np.uint64)
        found, at = [], 0
        for part in told["parts"]:
            ranges = tuple((int(first), int(last)) for first, last in part["ranges"])
            cells, at = _cells(part["cells"], len(ranges), sums, at)
            digests = Digests(seed, ranges, cells)
            found.append(Stated(int(part["range"]), digests, bool(part["sample"])))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DigestsRefused(f"expected a peer's digests, found other bytes: {error!r}") from error
    if at != sums.size or not all(part.range_tokens > 0 for part in found):
        raise DigestsRefused(f"expected {at} sums in a peer's digests, found {sums.size}")
    for part in found:
        _check_order(part.digests.ranges)
    return tuple(found)


def _check_order(ranges: Sequence[Extent]) -> None:
    """Refuses ranges out of order: nobody is kept busy with tokens that are named twice."""
    end = 0
    for extent in ranges:
        if not end <= extent[0] < extent[1]:
            raise DigestsRefused(f"expected ranges of tokens in order, found {extent} behind {end}")
        end = extent[1]


def _cells(
    told: Any, ranges: int, sums: UInt64Array, at: int
) -> tuple[dict[Name, Mapping[int, UInt64Array]], int]:
    """Reads the cells by layer and content; returns them, and how many sums are used by now."""
    cells: dict[Name, Mapping[int, UInt64Array]] = {}
    for layer, content, heads in told:
        of_heads = {}
        for head in heads:
            of_heads[int(head)] = sums[at : at + ranges]
            at += ranges
        cells[str(layer), Content(content)] = of_heads
    if at > sums.size:
        raise DigestsRefused(f"expected {at} sums in a peer's digests, found {sums.size}")
    return cells, at


def within(theirs: Stated, extent: Extent) -> tuple[Extent, ...]:
    """Returns the peer's ranges that lie within some tokens."""
    return tuple(
        (start, end)
        for start, end in theirs.digests.ranges
        if extent[0] <= start < end <= extent[1]
    )


def columns(digests: Digests, ranges: Sequence[Extent]) -> Digests:
    """Digests in some of their ranges; those that they do not have are left out."""
    at = {extent: column for column, extent in enumerate(digests.ranges)}
    kept = tuple(extent for extent in ranges if extent in at)
    chosen = [at[extent] for extent in kept]
    cells = {
        name: {head: sums[chosen] for head, sums in heads.items()}
        for name, heads in digests.cells.items()
    }
    return replace(digests, ranges=kept, cells=cells)
