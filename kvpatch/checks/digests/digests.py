"""Digests of a request's cached tokens: added up over ranks and ranges, and compared by place.

What the numbers are stands in ``digest_weights.py``, and what makes them of tensors in
``kvpatch/checks/digests/cache_digests.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvpatch.checks.digests.digest_weights import UInt64Array, Weights, weighed
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

    def of_ranges(self, weights: Weights) -> dict[int, UInt64Array]:
        """[range] by global head: the sums over all layers and contents, in a few numbers.

        Heads of one number belong together where layers have equally many of them; others want
        digests of their own.

        Raises:
            DigestsRefused: the weights are of another seed.
        """
        _check_alike("seeds", [self.seed, weights.seed])
        of_heads: dict[tuple[int, ...], UInt64Array] = {}
        for (layer, content), cells in self.cells.items():
            heads = tuple(cells)
            of_cells = weights.cells(layer, content, max(heads) + 1)[:, list(heads), None]
            sums = weighed(np.stack([*cells.values()]), of_cells)
            of_heads[heads] = of_heads.get(heads, np.uint64(0)) + sums
        found: dict[int, UInt64Array] = {}
        for heads, sums in of_heads.items():
            for head, of_head in zip(heads, sums, strict=True):
                found[head] = found.get(head, np.uint64(0)) + of_head
        return found

    def in_ranges(self, range_tokens: int) -> Digests:
        """The same in wider ranges: what lies between two multiples is added up.

        Raises:
            DigestsRefused: a range lies across a multiple, or something between two is missing.
        """
        lots = groupby(range(len(self.ranges)), lambda at: self.ranges[at][0] // range_tokens)
        groups = [list(group) for _, group in lots]
        merged = [(self.ranges[group[0]][0], self.ranges[group[-1]][1]) for group in groups]
        for group, (start, end) in zip(groups, merged, strict=True):
            covered = sum(self.ranges[at][1] - self.ranges[at][0] for at in group)
            if covered != end - start or (end - 1) // range_tokens != start // range_tokens:
                raise DigestsRefused(
                    f"expected tokens {start} to {end} without a gap, in a range of "
                    f"{range_tokens}, found ranges {[self.ranges[at] for at in group]}"
                )
        starts = [group[0] for group in groups]
        cells = {
            name: {head: np.add.reduceat(sums, starts) for head, sums in heads.items()}
            for name, heads in self.cells.items()
        }
        return replace(self, ranges=tuple(merged), cells=cells)


def ranges_of(first_token: int, end_token: int, range_tokens: int) -> tuple[Extent, ...]:
    """Tokens cut where a multiple of ``range_tokens`` is, so that both sides cut alike."""
    borders = [*range(first_token - first_token % range_tokens, end_token, range_tokens), end_token]
    cut = [(max(start, first_token), end) for start, end in zip(borders, borders[1:], strict=False)]
    return tuple((start, end) for start, end in cut if start < end)


def of_all_ranks(parts: Sequence[Digests]) -> Digests:
    """Digests of other layers or heads of the same ranges; heads that several ranks hold once.

    Raises:
        DigestsRefused: two ranks have other bytes for one head, or seeds or ranges are unlike.
    """
    first = parts[0]
    _check_alike("seeds", [part.seed for part in parts])
    _check_alike("ranges of tokens", [part.ranges for part in parts])
    cells: dict[Name, dict[int, UInt64Array]] = {}
    for part in parts:
        for name, heads in part.cells.items():
            known = cells.setdefault(name, {})
            for head, sums in heads.items():
                if not np.array_equal(known.setdefault(head, sums), sums):
                    raise DigestsRefused(
                        f"layer {name[0]!r}: expected ranks that hold the same {name[1].value} of "
                        f"head {head}, found unlike digests"
                    )
    return replace(first, cells=cells)


def of_all_ranges(parts: Sequence[Digests]) -> Digests:
    """Digests of the same cells in other ranges, which stay apart (:meth:`Digests.in_ranges`).

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
