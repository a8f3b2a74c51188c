"""A plan from planes to planes with the zeros behind it: what reads do in steps, at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.direct_plan import Plan, plan_runs
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.plane_copies import copies_between, missing_heads
from kvpatch.geometry.segments import Int64Array, Segments


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
        missing = missing_heads(remote_planes, local_planes)
        if missing:
            layer, content, head = missing[0]
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
