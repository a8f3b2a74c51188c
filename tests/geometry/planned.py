"""A plan from planes to planes with the zeros behind it: what reads do in steps, at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.direct_plan import Plan, plan_parts
from kvpatch.geometry.plane import Plane, names_of_heads
from kvpatch.geometry.plane_copies import Copy, copies_between
from kvpatch.geometry.segments import Int64Array, Segments


def plan_runs(parts: Iterable[tuple[Segments, Sequence[Copy]]]) -> Plan:
    """All runs of some copies in one plan."""
    return next(plan_parts(parts, sys.maxsize), Plan(*np.empty((3, 0), dtype=np.int64)))


@dataclass(frozen=True)
class CopyAndZeros(Plan):
    """Byte runs to copy and byte runs to zero."""

    zero_address: Int64Array
    zero_length: Int64Array


def plan_copy(
    segments: Segments,
    remote_planes: Sequence[Plane],
    local_planes: Sequence[Plane],
    tail: Segments | None = None,
    partial_heads: bool = False,
) -> CopyAndZeros:
    """The runs that bring the segments' tokens of every local plane from the remote ones.

    Args:
        tail: what to zero in the local planes (:func:`uncovered_tail`).
        partial_heads: take what the remote planes hold and leave the other heads alone.

    Raises:
        UnplannableCopy: a layer or head is missing, contents differ in width or item
            size, or a segment reaches outside a plane.
    """
    if not partial_heads:
        missing = names_of_heads(local_planes) - names_of_heads(remote_planes)
        if missing:
            layer, content, head = min(missing, key=lambda one: (one[0], one[1].value, one[2]))
            raise UnplannableCopy(
                f"expected a remote {content.value} plane of layer {layer!r} with head {head}, "
                f"found none, nor {len(missing) - 1} more such heads"
            )
    copies = plan_runs([(segments, copies_between(remote_planes, local_planes))])
    zeros = plan_runs([] if tail is None else [(tail, copies_between(local_planes, local_planes))])
    return CopyAndZeros(
        copies.remote_address,
        copies.local_address,
        copies.length,
        zero_address=zeros.local_address,
        zero_length=zeros.length,
    )
