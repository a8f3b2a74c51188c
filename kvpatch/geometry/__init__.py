"""What a KV cache looks like and which bytes go where: pure arithmetic.

Imports neither torch nor vllm. A cache is a strided array; a :class:`Plane` is one kind
of content of one layer of it; a plan is a list of byte runs between two sets of planes.
"""

from __future__ import annotations

from kvpatch.geometry.errors import UnpairableBlocks, UnplannableCopy, UnreadableGeometry
from kvpatch.geometry.layouts import (
    LAYOUTS,
    CacheSizes,
    Layout,
    dense_plane,
    host_mirror,
    named_layout,
)
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.order import DimensionOrder, KeyOrder
from kvpatch.geometry.plan import Plan, missing_heads, plan_copy
from kvpatch.geometry.plane import Content, Counts, Plane, Strides
from kvpatch.geometry.read import read_planes
from kvpatch.geometry.segments import (
    BlockList,
    Segments,
    kernel_blocks,
    pair_blocks,
    uncovered_tail,
)
from kvpatch.geometry.tensor import TensorFacts

__all__ = [
    "LAYOUTS",
    "BlockList",
    "CacheSizes",
    "Content",
    "Counts",
    "DimensionOrder",
    "KeyOrder",
    "Layout",
    "Memory",
    "Plan",
    "Plane",
    "Segments",
    "Strides",
    "TensorFacts",
    "UnpairableBlocks",
    "UnplannableCopy",
    "UnreadableGeometry",
    "dense_plane",
    "host_mirror",
    "kernel_blocks",
    "missing_heads",
    "named_layout",
    "pair_blocks",
    "plan_copy",
    "read_planes",
    "uncovered_tail",
]
