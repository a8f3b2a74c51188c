"""Digests of a request's cached tokens: joined, and compared by place.

What the numbers are stands in ``digest_weights.py``, and what makes them of tensors in
``kvpatch/checks/digests/cache_digests.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvpatch.checks.digests.digest_weights import UInt64Array
from kvpatch.core.errors import DigestsRefused
from kvpatch.geometry.plane import Content

#: A layer, and which of its contents.
Name = tuple[str, Content]
#: The first token, and the one past the last.
Extent = tuple[int, int]


class Place(NamedTuple):
    """What a digest says something about: heads of a layer's content, in a range of tokens."""

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
    """What two digests say of each other; only what was in both of them was looked at.

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
        """Whether all of ours was compared, and is theirs: nothing less is a load verified."""
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
    """Tokens cut where a multiple of ``range_tokens`` is, so that both sides cut alike."""
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
    """What of ours differs from theirs, and what of ours theirs says nothing about.

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
    """Whether all are the same.

    Raises:
        DigestsRefused: they are not.
    """
    other = next((one for one in found if one != found[0]), None)
    if other is not None:
        raise DigestsRefused(
            f"expected digests of the same {what}, found {found[0]!r} and {other!r}"
        )
