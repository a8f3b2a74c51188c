"""Where bytes lie: host or device memory."""

from __future__ import annotations

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
