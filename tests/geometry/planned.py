"""A plan from planes to planes in one piece: what reads do in steps, at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np

from kvpatch.geometry.direct_plan import Plan, plan_parts
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.plane_copies import Copy, copies_between
from kvpatch.geometry.segments import Segments


def plan_runs(parts: Iterable[tuple[Segments, Sequence[Copy]]]) -> Plan:
    """All runs of some copies in one plan."""
    return next(plan_parts(parts, sys.maxsize), Plan(*np.empty((3, 0), dtype=np.int64)))


def plan_copy(
    segments: Segments, remote_planes: Sequence[Plane], local_planes: Sequence[Plane]
) -> Plan:
    """The runs that bring the segments' tokens of local planes from the remote ones."""
    return plan_runs([(segments, copies_between(remote_planes, local_planes))])
