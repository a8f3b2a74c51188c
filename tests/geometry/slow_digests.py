"""Digests the slow way: Python's whole numbers, a word at a time, by the docstring's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvpatch.checks.digests import ROW_WORDS, Digests, Extent, Weights, compare
from kvpatch.geometry.plane import Content, HeadName

_ALL_BITS = 2**64 - 1


def row_sums(row: bytes, weights: Weights) -> list[int]:
    """Of one token of one head; of a row that is too long, each part's."""
    words = [
        int.from_bytes(row[at : at + 4].ljust(4, b"\0"), "little", signed=True)
        for at in range(0, len(row), 4)
    ]
    parts = [words[at : at + ROW_WORDS] for at in range(0, len(words), ROW_WORDS)]
    return [
        sum(word * int(weight) for word, weight in zip(part, weights.words(len(part)), strict=True))
        & _ALL_BITS
        for part in parts
    ]


def cell(rows: Sequence[bytes], first_token: int, weights: Weights) -> int:
    """Of a head's tokens, the first of which has this position in the request."""
    sums = [row_sums(row, weights) for row in rows]
    flat = [one for of_token in sums for one in of_token]
    first = first_token * len(sums[0])
    low, high = weights.rows(first, first + len(flat)).tolist()
    return _halves(flat, low, high)


def _halves(sums: Sequence[int], low: Sequence[int], high: Sequence[int]) -> int:
    total = 0
    for one, of_low, of_high in zip(sums, low, high, strict=True):
        upper = one >> 32
        upper -= (upper >> 31) << 32
        total += (one & (2**32 - 1)) * of_low + upper * of_high
    return total & _ALL_BITS


def digests_of(
    cells: Mapping[tuple[str, Content], Mapping[int, Sequence[int]]],
    ranges: tuple[Extent, ...],
    seed: bytes,
) -> Digests:
    """Digests of sums by layer and content, and by head."""
    flat = {(*name, head): sums for name, of in cells.items() for head, sums in of.items()}
    sums = np.array(list(flat.values()), dtype=np.uint64).reshape(len(flat), len(ranges))
    return Digests(seed, ranges, tuple(flat), sums)


def as_numbers(digests: Digests) -> dict[HeadName, list[int]]:
    """Sums by head, one for each range."""
    return dict(zip(digests.heads, digests.sums.tolist(), strict=True))


def proves(theirs: Digests, ours: Digests) -> bool:
    """True if all of ours was compared, and is theirs."""
    found = compare(theirs, ours)
    return found.checked > 0 and not found.wrong and not found.unchecked


def of_all_ranks(parts: Sequence[Digests]) -> Digests:
    """Digests of other layers or heads of the same ranges; heads that several ranks hold once."""
    first = parts[0]
    cells: dict[HeadName, list[int]] = {}
    for part in parts:
        assert (part.seed, part.ranges) == (first.seed, first.ranges)
        for head, sums in as_numbers(part).items():
            assert cells.setdefault(head, sums) == sums, head
    sums = np.array(list(cells.values()), dtype=np.uint64)
    return replace(first, heads=tuple(cells), sums=sums)
