"""Tokens' slots of all layers, taken out of the cache in one gather, and compared with later ones.

Both the gather and the comparison are told to the stream that the model runs in, which puts them
before and after what the model writes. Nothing waits for them but who asks for the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpatch.geometry.segments import Int64Array
from kvpatch.geometry.slot_gather import SlotGather
from kvpatch.transfer.caches import done, side_streams
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.plane_bytes import in_units, uploaded

if TYPE_CHECKING:
    import torch


#: Each takes some MB while it is gathered and compared.
_SLOTS_AT_ONCE = 32
#: That are kept from before the model runs until after, of all loads of a step. A scheduler's own
#: limits are no bound: as many loads may end in a step as it runs requests at most, a thousand say.
_MOST_TAKEN_BYTES = 64 * 1024**2


class SlotCopies:
    """Of one cache.

    Args:
        memory: one range that all planes lie in, from the address that `gather` counts from.
        dtype: of the items, as what they are compared.
    """

    def __init__(self, gather: SlotGather, memory: Bytes, dtype: torch.dtype) -> None:
        self.gather = gather
        self._items = in_units(memory.memory, gather.item_bytes)
        self._dtype = dtype

    @cached_property
    def _constants(self) -> tuple[torch.Tensor, ...]:
        wanted = (self.gather.plane_of_item, self.gather.inner)
        return uploaded(wanted, self._items.device)

    @property
    def most_slots(self) -> int:
        """How many may be taken at the same time; one at least."""
        return max(1, _MOST_TAKEN_BYTES // (self.gather.inner.size * self.gather.item_bytes))

    def take(self, starts: Sequence[Int64Array]) -> TakenSlots:
        """Copies slots, each of which begins in a plane where its numbers say."""
        (on_device,) = uploaded((np.stack(starts),), self._items.device)
        return TakenSlots(self, on_device)

    def items(self, starts: torch.Tensor) -> torch.Tensor:
        """[slot, item]; taken as whole numbers, which every device can take of any type."""
        plane_of_item, inner = self._constants
        where = starts.index_select(1, plane_of_item) + inner
        return self._items.take(where).view(self._dtype)


class TakenSlots:
    """[slot, item] as they were when they were taken, some slots at a time."""

    def __init__(self, copies: SlotCopies, starts: torch.Tensor) -> None:
        self._copies = copies
        self._taken = [(some, copies.items(some)) for some in starts.split(_SLOTS_AT_ONCE)]

    def compare(self) -> PendingDistances:
        """How far what now stands there is from what was taken."""
        import torch

        sums = torch.cat([self._sums(starts, taken) for starts, taken in self._taken], dim=1)
        streams = side_streams(sums.device)
        if streams is None:
            return PendingDistances(sums, done)
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        event = streams.Event()
        event.record(streams.current_stream(sums.device))
        return PendingDistances(host, event.query, event.synchronize)

    def _sums(self, starts: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        """[difference or now or before, slot, plane] the sums of squares."""
        import torch

        now, before = self._copies.items(starts).float(), taken.float()
        return torch.stack([self._by_plane(one) for one in (now - before, now, before)])

    def _by_plane(self, items: torch.Tensor) -> torch.Tensor:
        """[slot, plane] the sum of squares."""
        import torch

        squares = items * items
        found = [
            squares[:, alike.items].unflatten(1, (alike.planes.stop - alike.planes.start, -1))
            for alike in self._copies.gather.alike
        ]
        return torch.cat([of_planes.sum(-1) for of_planes in found], dim=1)


class PendingDistances:
    """Distances that a device may still be working out."""

    def __init__(
        self,
        sums: torch.Tensor,
        is_ready: Callable[[], bool],
        wait: Callable[[], object] = done,
    ) -> None:
        self._sums = sums
        self.is_ready = is_ready
        self._wait = wait

    def read(self) -> npt.NDArray[np.float64]:
        """[slot, plane]: the norm of the difference by the larger norm; waits for the device."""
        self._wait()
        apart, now, before = np.sqrt(self._sums.double().numpy())
        largest = np.maximum(now, before)
        # A slot of zeros is as far as nothing from another one.
        with np.errstate(invalid="ignore"):  # what is no number gives none
            found: npt.NDArray[np.float64] = np.divide(
                apart, largest, out=np.zeros_like(apart), where=largest != 0
            )
        return found
