"""Some heads of a plane, as a plane of their own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import groupby

from kvpatch.geometry.plane import Plane


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
