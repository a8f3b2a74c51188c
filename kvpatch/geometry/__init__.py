"""What a KV cache looks like and which bytes go where: pure arithmetic.

Imports neither torch nor vllm. A cache is a strided array; a :class:`Plane` is one kind
of content of one layer of it; a plan is a list of byte runs between two sets of planes.
"""

from __future__ import annotations

from kvpatch.core.errors import UnpairableBlocks, UnplannableCopy, UnreadableGeometry
from kvpatch.geometry.cross_layer_blocks import (
    LAYER_AXES,
    CrossLayerBlocks,
    in_order,
    layer_axes,
    pair_whole_blocks,
    places_of,
    read_cross_layer_blocks,
    read_packed_groups,
    shares_place,
)
from kvpatch.geometry.dimension_order import DimensionOrder, KeyOrder
from kvpatch.geometry.direct_or_staged import DEVICE_MEMORY, HOST_MEMORY, is_direct
from kvpatch.geometry.direct_plan import Plan, plan_runs
from kvpatch.geometry.layout_strides import (
    BY_COLUMN,
    HND,
    LAYER_BY_LAYER,
    LAYERS_INSIDE_BLOCKS,
    NAMED_LAYOUTS,
    NHD,
    PACKED_HND,
    PACKED_NHD,
    Axes,
    DenseBlocks,
    InnerLayout,
    are_split,
    block_axes,
    block_bytes,
    dense_strides,
    inner_layout,
    inner_layout_of_axes,
    layer_by_layer,
    row_bytes,
)
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.overlap import Overlap, overlaps_of
from kvpatch.geometry.plane import Content, Counts, Plane, Strides
from kvpatch.geometry.plane_copies import check_whole, missing_heads
from kvpatch.geometry.planes_of_tensors import read_planes
from kvpatch.geometry.segments import (
    BlockList,
    Segments,
    kernel_blocks,
    pair_blocks,
    uncovered_tail,
)
from kvpatch.geometry.staged_plan import Chunk, Placement, Share, plan_chunks
from kvpatch.geometry.tensor_facts import TensorFacts, extent_bytes

__all__ = [
    "Axes",
    "BY_COLUMN",
    "BlockList",
    "Content",
    "Counts",
    "CrossLayerBlocks",
    "Overlap",
    "DEVICE_MEMORY",
    "DenseBlocks",
    "DimensionOrder",
    "HND",
    "HOST_MEMORY",
    "InnerLayout",
    "KeyOrder",
    "LAYERS_INSIDE_BLOCKS",
    "LAYER_BY_LAYER",
    "LAYER_AXES",
    "Memory",
    "NAMED_LAYOUTS",
    "NHD",
    "PACKED_HND",
    "PACKED_NHD",
    "Placement",
    "Plan",
    "Plane",
    "Chunk",
    "Segments",
    "Share",
    "Strides",
    "TensorFacts",
    "UnpairableBlocks",
    "UnplannableCopy",
    "UnreadableGeometry",
    "are_split",
    "block_axes",
    "block_bytes",
    "check_whole",
    "overlaps_of",
    "dense_strides",
    "extent_bytes",
    "in_order",
    "inner_layout",
    "inner_layout_of_axes",
    "is_direct",
    "kernel_blocks",
    "layer_axes",
    "layer_by_layer",
    "missing_heads",
    "pair_blocks",
    "pair_whole_blocks",
    "places_of",
    "plan_chunks",
    "plan_runs",
    "read_cross_layer_blocks",
    "read_packed_groups",
    "read_planes",
    "row_bytes",
    "shares_place",
    "uncovered_tail",
]
