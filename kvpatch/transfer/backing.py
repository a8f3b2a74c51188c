"""The allocation behind an address, where an allocator swaps pages under its tensors.

kvcached maps one page of zeros wherever none of its own is, and its own while a block in
it is in use: every address can be read and written, and the driver alone knows whether
what is there is anybody's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0
#: The smallest page that the driver maps.
_GRANULE_BYTES = 2 * 1024**2
_PROBES = 8


@dataclass(frozen=True)
class Driver:
    """The driver's knowledge of allocations.

    Attributes:
        allocation_at: the number of the allocation that is mapped at an address; None where the
            address is not one of mapped pages.
        granule_bytes: the smallest page; every page begins at a multiple of it.
    """

    allocation_at: Callable[[int], int | None]
    granule_bytes: int


def driver() -> Driver | None:
    """CUDA's, where this process has it loaded; None elsewhere."""
    try:
        cuda = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
        retain, release = cuda.cuMemRetainAllocationHandle, cuda.cuMemRelease
    except (OSError, AttributeError):  # a driver before 11.0 has no such functions
        return None
    retain.argtypes = [ctypes.POINTER(ctypes.c_ulonglong), ctypes.c_void_p]
    release.argtypes = [ctypes.c_ulonglong]

    def allocation_at(address: int) -> int | None:
        handle = ctypes.c_ulonglong()
        if retain(ctypes.byref(handle), address) != _SUCCESS:
            return None
        release(handle)
        return handle.value

    return Driver(allocation_at, _GRANULE_BYTES)


def filler_of(known: Driver, address: int, size_bytes: int) -> int | None:
    """The allocation at places that are too far from one another for a page of its own.

    None where all that is found is there once: a pool in use as a whole.
    """
    places: dict[int, list[int]] = {}
    for number in range(_PROBES):
        found = known.allocation_at(address + number * size_bytes // _PROBES)
        if found is not None:
            places.setdefault(found, []).append(number)
    for found, numbers in places.items():
        if numbers[-1] - numbers[0] > 1:
            return found
    return None
