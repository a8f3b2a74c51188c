"""Direct or staged: which of the two ways of reading a region is faster.

Direct posts one run for every stretch that is contiguous on both sides. Staged posts
one for every remote block and copies each wanted byte once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvpatch.geometry.overlap import Overlap
from kvpatch.geometry.plane_copies import contiguous_bytes
from kvpatch.geometry.segments import Segments


@dataclass(frozen=True)
class Costs:
    """The time that moving bytes takes on a machine.

    Attributes:
        run_seconds: of posting and completing one run, beside its bytes.
        wire_bytes_per_second: of runs, wherever they land.
        copy_bytes_per_second: of the strided copy out of the buffer.
    """

    run_seconds: float
    wire_bytes_per_second: float
    copy_bytes_per_second: float


#: Measured by experiments/bench_transfer.py and bench_runs.py on 2 busy cores of a server, NIXL
#: 1.5.1 over UCX between two processes (CMA), 4 NIXL threads as vLLM asks for, 128 MiB: 262,144
#: runs of 512 bytes take 2.6 us each; runs of 128 KiB move 2.5 to 3.4 GB/s; a chunk takes 0.3 ns a
#: byte more with its copy. Runs under about 8 KiB are staged (at 8 KiB direct 1.6, staged 1.1
#: GB/s; at 16 KiB 3.0 and 1.6).
HOST_MEMORY = Costs(2.6e-6, 3.5e9, 3e9)

#: Not measured: what vendors state for one NIC of 400 Gbit/s and for device memory.
DEVICE_MEMORY = Costs(1e-6, 40e9, 500e9)


def is_direct(overlap: Overlap, segments: Segments, costs: Costs) -> bool:
    """True if a region is read faster in runs of its own than through a buffer."""
    wanted = runs = 0.0
    tokens = int(segments.tokens.sum())
    longest = int(segments.tokens.max())
    for copy in overlap.copies:
        size = copy.strides.item_bytes * prod(axis.size for axis in copy.strides.inner) * tokens
        wanted += size
        # As if all segments were as long as the longest: those at the ends are few.
        runs += size / contiguous_bytes(copy.strides, longest)
    blocks = 1 + int((segments.remote_block[1:] != segments.remote_block[:-1]).sum())
    landed = sum(span.span_bytes for span in overlap.spans) * blocks
    direct = runs * costs.run_seconds + wanted / costs.wire_bytes_per_second
    # One after the other: on a host one thread does both. On a device copies run beside the wire,
    # but take next to nothing.
    landing = len(overlap.spans) * blocks * costs.run_seconds + landed / costs.wire_bytes_per_second
    return direct <= landing + wanted / costs.copy_bytes_per_second
