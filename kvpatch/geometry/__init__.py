"""The geometry of a KV cache and which bytes go where: pure arithmetic.

Imports neither torch nor vllm. A cache is a strided array; a ``Plane`` is one kind of content of
one layer of it; a plan is a list of byte runs between two sets of planes.

The parts, in the order in which a read uses them:

``plane``               memory, a tensor's facts, one kind of content of one layer, its heads
``dimension_order``     the meaning of each dimension of a tensor
``layout_strides``      the strides of each layout
``planes_of_tensors``   the planes of a tensor
``cross_layer_blocks``  blocks that hold all layers, and the order of these
``segments``            which tokens of which blocks, on both sides
``plane_copies``        strided copies between two planes, and the segments of tiled ones
``overlap``             the copies out of one remote region, and which way it is read faster
``direct_plan``         runs that go straight to their places
``staged_plan``         chunks through a staging buffer, and their placements
``state_shares``        which bytes of a rank's recurrent state are which of another's
"""
