"""The facts of a registered tensor that geometry needs, without torch; and memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvpatch.core.errors import UnreadableGeometry


@dataclass(frozen=True)
class Memory:
    """A memory as NIXL names it.

    Attributes:
        kind: "DRAM" for the host, "VRAM" for a device.
        device_id: the device's index; 0 for the host.
    """

    kind: Literal["DRAM", "VRAM"]
    device_id: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("DRAM", "VRAM"):
            raise UnreadableGeometry(f"memory: expected DRAM or VRAM, found {self.kind!r}")
        if self.device_id < 0:
            raise UnreadableGeometry(
                f"memory: expected a device index of 0 or more, found {self.device_id}"
            )


@dataclass(frozen=True)
class TensorFacts:
    """The place and shape of one tensor, as its framework states them.

    Nothing is checked here: :func:`~kvpatch.geometry.planes_of_tensors.read_planes` does that, and
    knows the layer's name to put into its refusal.

    Attributes:
        address: of the first element.
        shape: sizes, in elements.
        strides: in elements, one per dimension.
        item_bytes: bytes of one element.
        storage_address: where the allocation behind the tensor starts.
        storage_bytes: how long that allocation is.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    memory: Memory
    storage_address: int
    storage_bytes: int


def extent_bytes(axes: Iterable[tuple[int, int]], item_bytes: int) -> int:
    """Returns the bytes from the first to past the last element of ``(size, stride_bytes)`` axes.

    Does not validate: sizes are at least 1, strides at least 0.
    """
    return sum((size - 1) * stride for size, stride in axes) + item_bytes


def axes_nest(axes: Iterable[tuple[int, int]], item_bytes: int) -> bool:
    """True if no two elements can share a byte, by strides that step over one another.

    Each axis, from the smallest stride up, must step past everything that the smaller
    ones reach. Every layout that an engine makes does; a set of strides that does not
    either overlaps or is one that nobody has read yet.
    """
    reach = item_bytes
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if size == 1:
            continue
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True
