"""The engine's own KV cache as bytes that staged copies write to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvpatch.geometry import Placement, Plane, Segments
from kvpatch.transfer.device_copies import streams_of
from kvpatch.transfer.place import Indices, place_in_host_memory, place_on_device
from kvpatch.transfer.zeros import zero_tokens

if TYPE_CHECKING:
    import torch


class Caches:
    """Every layer's allocation; layers that share one share the view of it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._bytes: dict[str, tuple[int, Any]] = {}
        self._stream: Any = None

    @property
    def device(self) -> torch.device:
        """Where the caches lie, the staging buffer too."""
        return next(iter(self._tensors.values())).device

    def mark(self) -> Any:
        """What the engine's thread has told the device by now; None where copies end at once.

        Called when a read begins: what the model has under way then may be of whoever had these
        blocks before.
        """
        streams = side_streams(self.device)
        if streams is None:
            return None
        event = streams.Event()
        event.record(streams.current_stream(self.device))
        return event

    def place(
        self, staging: torch.Tensor, placements: tuple[Placement, ...], after: Any
    ) -> Callable[[], bool]:
        """Copies what has landed to its places; what is returned says whether it is done.

        On a device the copies run in a stream of their own. A read is reported only when they
        are done, so that whatever the model runs then comes after.

        Args:
            staging: a chunk's buffer, ``uint8``, one-dimensional, on the device or the host.
            after: what :meth:`mark` returned when the read began; copies come after it.
        """
        streams = side_streams(self.device)
        if streams is None:
            self._copy(staging, placements)
            return _done
        if self._stream is None:
            self._stream = streams.Stream(device=self.device)
        with streams.stream(self._stream):
            self._stream.wait_event(after)
            self._copy(staging, placements)
            event = streams.Event()
            event.record(self._stream)
        query: Callable[[], bool] = event.query
        return query

    def _copy(self, staging: torch.Tensor, placements: tuple[Placement, ...]) -> None:
        if self.device.type == "cpu":
            landed = staging.numpy()
            for placement in placements:
                address, cache = self._layer(placement.layer)
                place_in_host_memory(landed, cache.numpy(), address, placement)
            return
        indices = Indices(self.device)
        # From host memory in one copy; its space is the chunk's until the event.
        staging = staging.to(self.device, non_blocking=True)
        for placement in placements:
            address, cache = self._layer(placement.layer)
            place_on_device(staging, cache, address, placement, indices)

    def zero(self, layer: str, plane: Plane, tail: Segments) -> None:
        """Zeroes whole tokens of one plane of a layer."""
        zero_tokens(self._tensors[layer], plane, tail)

    def settle(self) -> None:
        """Waits for every copy that has been asked for; for reads that end before they are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def _layer(self, name: str) -> tuple[int, torch.Tensor]:
        if name not in self._bytes:
            import torch

            storage = self._tensors[name].untyped_storage()
            view = torch.empty(0, dtype=torch.uint8, device=self._tensors[name].device)
            self._bytes[name] = storage.data_ptr(), view.set_(storage, 0, (storage.nbytes(),), (1,))
        return self._bytes[name]


def _done() -> bool:
    return True


def side_streams(device: torch.device) -> Any:
    """The module of a device's streams; None where copies end at once."""
    return None if device.type == "cpu" else streams_of(device)
