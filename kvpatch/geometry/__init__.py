"""What a KV cache looks like and which bytes go where: pure arithmetic.

Imports neither torch nor vllm. A cache is a strided array; a :class:`Plane` is one kind
of content of one layer of it; a plan is a list of byte runs between two sets of planes.
"""

from __future__ import annotations

from kvpatch.core.errors import UnpairableBlocks, UnplannableCopy, UnreadableGeometry
from kvpatch.geometry.costs import DEVICE_MEMORY, HOST_MEMORY, Costs, is_direct
from kvpatch.geometry.crossings import Crossing, cross
from kvpatch.geometry.layouts import (
    LAYOUTS,
    CacheSizes,
    Layout,
    dense_plane,
    host_mirror,
    named_layout,
)
from kvpatch.geometry.meetings import check_whole, missing_heads
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.order import DimensionOrder, KeyOrder
from kvpatch.geometry.plan import Plan, plan_copy, plan_runs
from kvpatch.geometry.plane import Content, Counts, Plane, Strides
from kvpatch.geometry.read import read_planes
from kvpatch.geometry.rounds import (
    Placement,
    Round,
    Share,
    plan_rounds,
)
from kvpatch.geometry.rows import (
    PART_AXES,
    PartAxes,
    Row,
    in_order,
    pair_rows,
    part_axes,
    part_bytes,
    part_planes,
    places_of,
    read_packed_row,
    read_row,
    shares_place,
)
from kvpatch.geometry.segments import (
    BlockList,
    Segments,
    kernel_blocks,
    pair_blocks,
    uncovered_tail,
)
from kvpatch.geometry.tensor import TensorFacts

__all__ = [
    "DEVICE_MEMORY",
    "HOST_MEMORY",
    "LAYOUTS",
    "PART_AXES",
    "BlockList",
    "CacheSizes",
    "Content",
    "Costs",
    "Counts",
    "Crossing",
    "DimensionOrder",
    "KeyOrder",
    "Layout",
    "Memory",
    "PartAxes",
    "Placement",
    "Plan",
    "Plane",
    "Round",
    "Row",
    "Segments",
    "Share",
    "Strides",
    "TensorFacts",
    "UnpairableBlocks",
    "UnplannableCopy",
    "UnreadableGeometry",
    "check_whole",
    "cross",
    "dense_plane",
    "host_mirror",
    "in_order",
    "is_direct",
    "kernel_blocks",
    "missing_heads",
    "named_layout",
    "pair_blocks",
    "pair_rows",
    "part_axes",
    "part_bytes",
    "part_planes",
    "places_of",
    "plan_copy",
    "plan_rounds",
    "plan_runs",
    "read_packed_row",
    "read_planes",
    "read_row",
    "shares_place",
    "uncovered_tail",
]
