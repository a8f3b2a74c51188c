"""The check of which pages kvcached has mapped, before a request's blocks are filled.

What is read into a page that is not mapped lands in the page of zeros that all of them
share, without an error, and is gone where kvcached maps a page there later. P's pages are
P's to keep: D cannot see them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvpatch.core.errors import ReadRefused
from kvpatch.geometry.segments import Int64Array, kernel_blocks
from kvpatch.geometry.tensor_facts import extent_bytes
from kvpatch.load.read_request import ReadRequest
from kvpatch.transfer import backing
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.registered_caches import LayerCache

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.registration")


@dataclass(frozen=True)
class MappedPages:
    """The pages behind a worker's tensors.

    Attributes:
        filler: what is mapped where kvcached has mapped nothing of its own.
    """

    driver: backing.Driver
    filler: int
    layers: Mapping[str, LayerCache]


def pages_behind(
    kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, LayerCache]
) -> MappedPages | None:
    """Returns how to tell pages that are not mapped, as most are now; None if unknown."""
    driver = backing.driver()
    if driver is None or not layers:
        return None
    storage = kv_caches[next(iter(layers))].untyped_storage()
    filler = backing.filler_of(driver, storage.data_ptr(), storage.nbytes())
    if filler is None:
        _LOG.info("kvcached's page of zeros is mapped nowhere: unmapped pages are not looked for")
        return None
    return MappedPages(driver, filler, layers)


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
