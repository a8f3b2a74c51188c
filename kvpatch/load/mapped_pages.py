"""The check of which pages kvcached has mapped, before a request's blocks are filled.

What is read into a page that is not mapped lands in the page of zeros that all of them
share, without an error, and is gone where kvcached maps a page there later. P's pages are
P's to keep: D cannot see them. The driver alone knows what is mapped at an address.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvpatch.core.errors import ReadRefused
from kvpatch.geometry.plane import extent_bytes
from kvpatch.geometry.segments import Int64Array, kernel_blocks
from kvpatch.load.read_request import ReadRequest
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.registered_caches import LayerCache

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.registration")

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


@dataclass(frozen=True)
class MappedPages:
    """The pages behind a worker's tensors.

    Attributes:
        filler: what is mapped where kvcached has mapped nothing of its own.
    """

    driver: Driver
    filler: int
    layers: Mapping[str, LayerCache]


def pages_behind(
    kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, LayerCache]
) -> MappedPages | None:
    """Returns how to tell pages that are not mapped, as most are now; None if unknown."""
    known = driver()
    if known is None or not layers:
        return None
    storage = kv_caches[next(iter(layers))].untyped_storage()
    filler = filler_of(known, storage.data_ptr(), storage.nbytes())
    if filler is None:
        _LOG.info("kvcached's page of zeros is mapped nowhere: unmapped pages are not looked for")
        return None
    return MappedPages(known, filler, layers)


def refuse_unmapped(
    pages: MappedPages | None,
    groups: Sequence[Group],
    request: ReadRequest,
    kernel_blocks_per_block: int,
) -> None:
    """Refuses a request whose blocks have no page of their own here."""
    if pages is None:
        return
    for group, named in zip(groups, request.local_blocks, strict=False):
        # Block 0 is what vLLM puts where a window has slid on; nobody fills it.
        blocks = kernel_blocks([block for block in named if block], kernel_blocks_per_block)
        for layer, block, address in _places(pages, group, blocks):
            if pages.driver.allocation_at(address) == pages.filler:
                raise ReadRefused(
                    f"block {block} of {layer} is to be filled and the page at {address:#x} under "
                    "it is not mapped: found the page of zeros that all unmapped ones of kvcached "
                    "share, expected one of its own for every block that is handed out. Its "
                    "processes disagree",
                    "give the engine and its workers one KVCACHED_CONTIGUOUS_LAYOUT, "
                    "KVCACHED_PAGE_SIZE_MB and KVCACHED_IPC_NAME, or set ENABLE_KVCACHED=false",
                )


def _places(
    pages: MappedPages, group: Group, numbers: Int64Array
) -> Iterator[tuple[str, int, int]]:
    """Yields the layer, block and address of each page under the blocks, once, in two layers."""
    seen: set[int] = set()
    # kvcached maps a page of all layers together; the outermost ones end a pool's blocks.
    # A block of recurrent state is one of attention's memory, whichever layers have it.
    known = pages.layers.keys() if group.has_state else group.layers & pages.layers.keys()
    ordered = sorted(known, key=lambda name: pages.layers[name].planes[0].address)
    for layer in dict.fromkeys((*ordered[:1], *ordered[-1:])):
        for plane in pages.layers[layer].planes:
            first = plane.address + numbers * plane.strides_bytes.block
            for addresses in (first, first + extent_bytes(plane.axes[1:], plane.item_bytes) - 1):
                granules, which = np.unique(
                    addresses // pages.driver.granule_bytes, return_index=True
                )
                for granule, index in zip(granules.tolist(), which.tolist(), strict=True):
                    if granule not in seen:
                        seen.add(granule)
                        yield layer, int(numbers[index]), int(addresses[index])


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
