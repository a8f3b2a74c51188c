"""The engine's own KV cache as bytes that staged copies write to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane_copies import Reach, local_end, reach_of
from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer.copying_thread import Copy, CopyingThread
from kvpatch.transfer.one_memory import Bytes, memory_at, storage_of, streams_of
from kvpatch.transfer.place import PlaceOnDevice, place_in_host_memory, place_on_device
from kvpatch.transfer.plane_bytes import Tails, zero_tokens

if TYPE_CHECKING:
    import torch


class Caches:
    """The engine's own KV cache, by layer.

    Attributes:
        thread: that copies in host memory; None where who asks for copies makes them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.thread: CopyingThread | None = None
        self._tensors = tensors
        self._stream: Any = None

    @cached_property
    def _layers(self) -> dict[str, Bytes]:
        return {layer: _bytes_of(tensor) for layer, tensor in self._tensors.items()}

    @property
    def device(self) -> torch.device:
        return next(iter(self._tensors.values())).device

    def mark(self) -> Any:
        """Marks the device work that the engine's thread has queued; None where copies end at once.

        It is called when a read begins. The model's work that is queued then may still use these
        blocks for the request that had them before.
        """
        streams = streams_of(self.device)
        if streams is None:
            return None
        event = streams.Event()
        event.record(streams.current_stream(self.device))
        return event

    def place(
        self, staging: torch.Tensor, placements: tuple[Placement, ...], after: Any
    ) -> Callable[[], bool]:
        """Copies what has landed to its places; what is returned says whether it is done.

        On a device the copies run in a stream of their own, in host memory on the thread that
        copies. A read is reported only when they are done, so that whatever the model runs then
        comes after.

        Args:
            staging: a chunk's buffer, ``uint8``, one-dimensional, on the device or the host.
            after: what :meth:`mark` returned when the read began; copies come after it.
        """
        if self.thread is not None:
            return self.thread.copy(partial(self._copy, staging, placements))
        return self._beside(after, lambda: self._copy(staging, placements))

    def zero(self, tails: Tails, after: Any) -> Callable[[], bool]:
        """Zeroes whole tokens; as :meth:`place` copies, but these few bytes by who asks for it."""
        return self._beside(after, lambda: self._zero(tails))

    def _beside(self, after: Any, write: Callable[[], None]) -> Callable[[], bool]:
        streams = streams_of(self.device)
        if streams is None:
            write()
            return done
        if self._stream is None:
            self._stream = streams.Stream(device=self.device)
        with streams.stream(self._stream):
            self._stream.wait_event(after)
            write()
            event = streams.Event()
            event.record(self._stream)
        query: Callable[[], bool] = event.query
        return query

    def _copy(self, staging: torch.Tensor, placements: tuple[Placement, ...]) -> None:
        self._check_inside(placements)
        into = [(self._layers[one.layer], one) for one in placements]
        if self.device.type == "cpu":
            landed = staging.numpy()
            for (address, cache), placement in into:
                place_in_host_memory(landed, cache.numpy(), address, placement)
            return
        # From host memory in one copy; its space is the chunk's until the event.
        placing_on(self.device)(staging.to(self.device, non_blocking=True), into)

    def _check_inside(self, placements: Iterable[Placement]) -> None:
        """Refuses what would write outside its own layer's allocation, as it is now."""
        reaches: dict[int, Reach] = {}
        for one in placements:
            reach = reaches.get(id(one.segments))
            if reach is None:
                reach = reaches[id(one.segments)] = reach_of(one.segments)[1]
            last = local_end(reach, one.local_address, one.strides)
            self._check_range(one.layer, one.local_address, last, is_found=reach.lowest >= 0)

    def _check_range(self, layer: str, first: int, last: int, *, is_found: bool = True) -> None:
        storage = self._tensors[layer].untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if not (is_found and start <= first <= last <= end):
            raise UnplannableCopy(
                f"expected to write to layer {layer!r} at {start:#x} to {end:#x}, found "
                f"{first:#x} to {last:#x}"
            )

    def _zero(self, tails: Tails) -> None:
        for planes, tail in tails:
            for plane in planes:
                self._check_range(plane.layer, *plane.span())
                zero_tokens(self._layers[plane.layer], plane, tail)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        if self.thread is not None:
            self.thread.settle()

    def give_up(self, copies: Iterable[Callable[[], bool]]) -> None:
        """Waits for those that have begun; others are left undone where that can be."""
        if self._stream is not None:
            self._stream.synchronize()
        for copy in copies:
            if isinstance(copy, Copy):
                copy.give_up()


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """Returns all of a tensor's allocation, which must outlive what is returned."""
    if tensor.device.type != "cpu":
        return storage_of(tensor)
    storage = tensor.untyped_storage()  # which torch resizes no more once numpy has seen it
    address = storage.data_ptr()
    return Bytes(address, memory_at(address, storage.nbytes(), tensor.device))


@cache
def placing_on(device: torch.device) -> PlaceOnDevice:
    """Returns what places on a device: one launch once Triton's kernel has been tried there."""
    if device.type != "cuda":
        return place_on_device
    try:
        from kvpatch.transfer.placing_kernel import place_surely
    except ImportError:  # torch without Triton
        return place_on_device
    return place_surely


def done() -> bool:
    """Returns True: for a copy that is over as soon as it was asked for."""
    return True
