"""A platform's own copies of blocks to host memory, in place of torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpatch.geometry.segments import kernel_blocks
from kvpatch.transfer.storageless import has_storage

if TYPE_CHECKING:
    import torch

#: (source by layer, target by layer, source blocks, target blocks, "d2h" or "h2d"), done when
#: it returns: what a platform's runner hands to vLLM's connector.
Operation = Callable[[Any, Any, list[int], list[int], str], None]


class PlatformCopies:
    """Copies whole blocks of every distinct tensor with a platform's operation.

    Args:
        sources, targets: every layer's on the device and in the pool.
        block_dimensions, blocks: as for :class:`kvpatch.host_buffer.host_pool.HostPool`.
    """

    def __init__(
        self,
        operation: Operation,
        sources: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        block_dimensions: Mapping[str, int],
        blocks: int,
    ) -> None:
        self._operation = operation
        #: Kernel blocks per block -> (sources, targets) of the layers that have so many.
        self._by_parts: dict[int, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
        seen = set()
        for layer, source in sources.items():
            place: tuple[Any, ...] = (id(source),)
            if has_storage(source):
                place = source.data_ptr(), tuple(source.shape), tuple(source.stride()), source.dtype
            if place in seen:  # layers with one tensor between them
                continue
            seen.add(place)
            parts = source.shape[block_dimensions[layer]] // blocks
            found = self._by_parts.setdefault(parts, ({}, {}))
            found[0][layer], found[1][layer] = source, targets[layer]

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks into host blocks."""
        for parts, (sources, targets) in self._by_parts.items():
            of, into = (kernel_blocks(ids, parts).tolist() for ids in (blocks, host_blocks))
            self._operation(sources, targets, of, into, "d2h")

    def settle(self) -> None:
        """The operation is done when it returns."""
