"""What a worker's witness sees the cache through: which slots, and how they are taken out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.connector.witness.calibration import floor_of
from kvpatch.connector.witness.loads import NO_PLACE, Load
from kvpatch.connector.witness.witnessed_planes import WitnessedPlanes, witnessed_planes
from kvpatch.core.errors import WitnessRefused
from kvpatch.geometry.segments import Int64Array
from kvpatch.geometry.slot_gather import slot_gather
from kvpatch.transfer.one_memory import one_memory
from kvpatch.transfer.slot_copies import SlotCopies

_WINDOWS = "windows that do not see the context"


@dataclass(frozen=True)
class Lens:
    """Of one worker.

    Attributes:
        floor: what rounding to the cache's type makes of a good load.
    """

    planes: WitnessedPlanes
    copies: SlotCopies
    floor: float

    def starts(self, load: Load) -> Int64Array | str:
        """Where a load's slot begins in every plane; or why it cannot be witnessed."""
        seen = self.planes.seen_tokens
        if seen is not None and load.position >= seen:
            return _WINDOWS
        found = self.copies.gather.starts(load.position, load.last_blocks)
        return NO_PLACE if found is None else found


def lens_of(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> Lens:
    """Of the tensors that the model writes to.

    Raises:
        WitnessRefused: nothing of them can be witnessed, and why.
        UnreadableGeometry, RegistrationRefused, UnexpectedCaches: they cannot be read.
    """
    import torch

    seen = witnessed_planes(release, kv_caches)
    memory = one_memory(kv_caches[name] for name in {plane.layer for plane in seen.planes})
    if memory is None:
        raise WitnessRefused("the device's memory is not one range")
    gather = slot_gather(seen.planes, seen.tables, memory.address)
    return Lens(seen, SlotCopies(gather, memory, seen.dtype), floor_of(torch.finfo(seen.dtype).eps))
