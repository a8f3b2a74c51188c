"""Some heads of a plane, as a plane of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import groupby

from kvpatch.geometry.plane import Content, Plane

HeadName = tuple[str, Content, int]
"""Layer, content and global number of a head."""


def names_of_heads(planes: Iterable[Plane]) -> frozenset[HeadName]:
    """Every head of every content of every layer of some planes."""
    return frozenset(
        (plane.layer, plane.content, head)
        for plane in planes
        for head in range(plane.first_head, plane.end_head)
    )


def planes_without(planes: Iterable[Plane], heads: Collection[HeadName]) -> list[Plane]:
    """Planes but for some of their heads; one that moves whole is left out with all of them."""
    found = []
    for plane in planes:
        numbers = range(plane.first_head, plane.end_head)
        left = [one for one in numbers if (plane.layer, plane.content, one) not in heads]
        found += [plane] if left and plane.is_whole else planes_of_heads(plane, left)
    return found


def planes_of_heads(plane: Plane, heads: Collection[int]) -> list[Plane]:
    """Those of a plane's heads that are among some; several planes where these have gaps."""
    wanted = [head for head in range(plane.first_head, plane.end_head) if head in heads]
    if len(wanted) == plane.counts.heads:
        return [plane]
    if plane.is_whole:
        return []  # its heads cannot be told apart
    runs = (list(run) for _, run in groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]))
    found = []
    for run in runs:
        first = run[0][1]
        skipped = (first - plane.first_head) * plane.strides_bytes.head
        counts = plane.counts._replace(heads=len(run))
        moved = plane.address + skipped
        found.append(replace(plane, address=moved, counts=counts, first_head=first))
    return found
