"""Slots in host memory for some of a device's KV cache blocks, and the copies into them.

Not a mirror: as many slots as there is room for. The slots of a layer are a tensor like
the layer's own, with slots for blocks, so that whatever can be registered and read on
the device can be here. Tensors that share memory on the device share it here, in the
same order, and each byte of a block is copied once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpatch._errors import RegistrationRefused
from kvpatch.transfer.host_memory import free_host_bytes, host_bytes
from kvpatch.transfer.own_copies import Operation, OwnCopies
from kvpatch.transfer.slot_rows import BlockTensor, Sheet, rows_of, slot_storage

if TYPE_CHECKING:
    import torch

#: What torch and platforms' own copies say where they cannot.
_CANNOT = (
    RuntimeError,  # and NotImplementedError, which is one
    AttributeError,
    TypeError,
    ValueError,
    IndexError,
)
#: Of device memory at once, for blocks on their way.
_GATHERED_BYTES = 32 * 1024**2
_WIDEST_BYTES = 8
#: On the host, what is worth threads; two or three fill what memory can take.
_LONG_BYTES = 4 * 1024**2
#: Slots that are worth a call of their own, and what is copied twice while it is in the cache.
_LONG_RUN = 4
_CACHED_BYTES = 256 * 1024
_MOST_THREADS = 4


class _Run(NamedTuple):
    """Slots that follow one another, and where their blocks are in the list of blocks."""

    slot: int
    first: int
    length: int


def block_bytes(
    tensors: Mapping[str, torch.Tensor], block_dimensions: Mapping[str, int], blocks: int
) -> int:
    """Bytes of one block over all layers; memory that layers share is counted once.

    Args:
        block_dimensions: which of each tensor's dimensions counts blocks.
        blocks: how many the engine names; a tensor may have each as several kernel blocks.

    Raises:
        RegistrationRefused: a tensor is not laid out in blocks.
    """
    total = 0
    for _, found in _by_storage(tensors, block_dimensions, blocks):
        total += sum(row.step_bytes for row in rows_of(found, blocks))
    return total


def unreachable(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Why none of these bytes can be named: a device whose tensors have no storage (XLA).

    None where every tensor has one.
    """
    for layer, tensor in tensors.items():
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError as error:  # NotImplementedError is one
            return f"{layer} of shape {tuple(tensor.shape)} has no storage: {error}"
        if tensor.numel() and not address:
            return f"the storage of {layer}, of shape {tuple(tensor.shape)}, is nowhere in memory"
    return None


def mirror_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """What a buffer of all blocks takes that has a tensor for every layer, as stock's has."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class HostPool:
    """Slots for blocks, one tensor a layer.

    Args:
        tensors: every layer's on the device.
        block_dimensions, blocks: as for :func:`block_bytes`.

    Attributes:
        tensors: like those on the device, in host memory, slots for blocks.
        slots: how many there are.
        size_bytes: of them all.

    Raises:
        RegistrationRefused: tensors not laid out in blocks, a host without so much
            memory, a device that does not copy what is in its memory.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        block_dimensions: Mapping[str, int],
        blocks: int,
        slots: int,
    ) -> None:
        import torch

        self.slots = slots
        self._blocks = blocks
        self._sources = tensors
        self._block_dimensions = block_dimensions
        self._device: torch.device = next(iter(tensors.values())).device
        storages = [
            (storage, slot_storage(found, blocks, slots))
            for storage, found in _by_storage(tensors, block_dimensions, blocks)
        ]
        self.size_bytes = sum(copy.size_bytes for _, copy in storages)
        _check_room(self.size_bytes, slots)
        found: dict[str, torch.Tensor] = {}
        #: (device bytes, host bytes, what to copy) of each storage.
        self._copies: list[tuple[torch.Tensor, torch.Tensor, tuple[Sheet, ...]]] = []
        for storage, copy in storages:
            host = host_bytes(copy.size_bytes, self._device, self)
            for layer, (offset, shape, strides) in copy.places.items():
                like = tensors[layer]
                found[layer] = torch.empty(0, dtype=like.dtype).set_(
                    host.untyped_storage(), offset // like.element_size(), shape, strides
                )
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            whole = whole.set_(storage, 0, (storage.nbytes(),), (1,))
            self._copies.append((whole, host, copy.sheets))
        self.tensors: Mapping[str, torch.Tensor] = {layer: found[layer] for layer in tensors}
        self._is_on_host = _is_on_host(self._device)
        self._streams = None if self._is_on_host else _streams_of(self._device)
        self._own: OwnCopies | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._stream: Any = None
        self._event: Any = None
        self._try()

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks into slots; in the order of calls, after all that the device was told.

        On a device with streams this only asks for it: what is in a slot may be read
        after :meth:`settle`.

        Raises:
            ValueError: a number that is none of a block or slot, or a slot named twice.
        """
        self._check(blocks, slots)
        if not blocks:
            return
        if self._own is not None:
            self._own.save(blocks, slots)
            return
        order = np.argsort(np.asarray(slots, dtype=np.int64))
        into = np.asarray(slots, dtype=np.int64)[order]
        of = np.asarray(blocks, dtype=np.int64)[order]
        runs = tuple(_runs(into))
        if self._is_on_host:
            self._copy_on_host(of, into, runs)
            return
        self._copy_from_device(of, runs)

    def use(self, operation: Operation) -> None:
        """From now on copies as the platform does, once that is seen to be right.

        Raises:
            RegistrationRefused: it raises, or what it copies is something else. What copied
                before goes on.
        """
        before, self._own = (
            self._own,
            OwnCopies(operation, self._sources, self.tensors, self._block_dimensions, self._blocks),
        )
        try:
            self._try()
        except RegistrationRefused:
            self._own = before
            raise

    def settle(self) -> None:
        """Waits until all that was saved is in host memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def _copy_on_host(self, of: Any, into: Any, runs: Sequence[_Run]) -> None:
        """In threads where it takes long: numpy lets go of the interpreter while it copies."""
        tasks = [
            partial(_copy_row, source, host, sheet, row, of, into, runs)
            for source, host, sheets in self._copies
            for sheet in sheets
            for row in range(sheet.count)
        ]
        if self._threads is None and len(of) * self.size_bytes // self.slots >= _LONG_BYTES:
            self._threads = ThreadPoolExecutor(_most_threads(), "kvpatch-host-pool")
        if self._threads is None:
            for task in tasks:
                task()
        else:
            for done in [self._threads.submit(task) for task in tasks]:
                done.result()

    def _copy_from_device(self, of: Any, runs: Sequence[_Run]) -> None:
        import torch

        if self._streams is None:
            self._gather(torch.from_numpy(of).to(self._device), runs, non_blocking=False)
            return
        if self._stream is None:
            self._stream = self._streams.Stream(device=self._device)
        current = self._streams.current_stream(self._device)
        with self._streams.stream(self._stream):
            # Uploaded before it waits, or this thread would wait for the model too.
            indices = torch.from_numpy(of).to(self._device, non_blocking=True)
            self._stream.wait_stream(current)
            self._gather(indices, runs, non_blocking=True)
            self._event = self._streams.Event()
            self._event.record(self._stream)

    def _gather(self, indices: torch.Tensor, runs: Sequence[_Run], non_blocking: bool) -> None:
        """One gather a sheet, as long as that takes little device memory."""
        for source, host, sheets in self._copies:
            for sheet in sheets:
                unit = _unit_bytes(source, host, sheet)
                rows, into = (
                    _sheet_view(memory, sheet, count, start, apart, unit)
                    for memory, count, start, apart in (
                        (source, self._blocks, sheet.source, sheet.source_apart),
                        (host, self.slots, sheet.target, sheet.target_apart),
                    )
                )
                at_once = max(1, _GATHERED_BYTES // (sheet.count * sheet.row_bytes))
                whole = sheet.step_bytes == sheet.row_bytes
                for start in range(0, len(indices), at_once):
                    found = rows.index_select(1, indices[start : start + at_once])
                    for run in _within(runs, start, at_once, split=not whole):
                        at = run.first - start
                        for row in range(sheet.count):
                            into[row, run.slot : run.slot + run.length].copy_(
                                found[row, at : at + run.length], non_blocking=non_blocking
                            )

    def _check(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if len(blocks) != len(slots) or len(set(slots)) != len(slots):
            raise ValueError(f"{len(blocks)} blocks for {len(set(slots))} of {len(slots)} slots")
        for numbers, count, what in ((blocks, self._blocks, "block"), (slots, self.slots, "slot")):
            outside = [number for number in numbers if not 0 <= number < count]
            if outside:
                raise ValueError(f"{what} {outside[0]} of {count}")

    def _try(self) -> None:
        """Copies the last block and looks at it, as the device itself shows it.

        Raises:
            RegistrationRefused: it cannot be copied, or is another one.
        """
        import torch

        slot, block = self.slots - 1, self._blocks - 1
        try:
            pairs = {layer: self._pair(layer, block, slot) for layer in self.tensors}
            for here, there in pairs.values():
                # Not by chance what is to come.
                there.view(_kinds()[there.element_size()]).copy_(
                    here.view(_kinds()[here.element_size()]).bitwise_not()
                )
            self.save([block], [slot])
            self.settle()
            wrong = [
                layer
                for layer, pair in pairs.items()
                if not torch.equal(*(half.view(_kinds()[half.element_size()]) for half in pair))
            ]
        except _CANNOT as error:
            raise RegistrationRefused(
                f"KV caches on {self._device} cannot be copied to host memory: {error}"
            ) from error
        if wrong:
            raise RegistrationRefused(
                f"a block of {', '.join(wrong)} on {self._device} is not itself after it was "
                "copied to host memory"
            )
        for _, there in pairs.values():
            there.zero_()

    def _pair(self, layer: str, block: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A block as the device shows it, and a slot."""
        dimension = self._block_dimensions[layer]
        source = self._sources[layer]
        parts = source.shape[dimension] // self._blocks
        return (
            source.narrow(dimension, block * parts, parts).cpu(),
            self.tensors[layer].narrow(dimension, slot * parts, parts),
        )


def _by_storage(
    tensors: Mapping[str, torch.Tensor], block_dimensions: Mapping[str, int], blocks: int
) -> Iterator[tuple[Any, list[BlockTensor]]]:
    """(storage, tensors in it), in the order of the layers."""
    found: dict[int, tuple[Any, list[BlockTensor]]] = {}
    for layer, tensor in tensors.items():
        dimension = block_dimensions[layer]
        parts, rest = divmod(tensor.shape[dimension], blocks)
        if rest or not parts:
            raise RegistrationRefused(
                f"layer {layer}: {tensor.shape[dimension]} blocks in a tensor of shape "
                f"{tuple(tensor.shape)}, where a multiple of {blocks} was planned"
            )
        storage = tensor.untyped_storage()
        _, members = found.setdefault(storage.data_ptr(), (storage, []))
        members.append(
            BlockTensor(
                layer,
                tensor.data_ptr() - storage.data_ptr(),
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.element_size(),
                dimension,
                parts,
            )
        )
    yield from found.values()


def _check_room(size_bytes: int, slots: int) -> None:
    free = free_host_bytes()
    if free is not None and size_bytes > free:
        raise RegistrationRefused(
            f"{slots} slots of host buffer take {size_bytes} bytes, and the host has {free} free: "
            "set KVPATCH_HOST_BUFFER_BYTES to less"
        )


def _is_on_host(device: torch.device) -> bool:
    """Whether "device" blocks are in host memory, where KVPATCH_HOST_BUFFER is always."""
    return bool(device.type == "cpu")


def _most_threads() -> int:
    """No more than the model itself has."""
    import torch

    return max(1, min(_MOST_THREADS, int(torch.get_num_threads())))


def _streams_of(device: torch.device) -> Any:
    """The module of the device's streams; None where it has none."""
    import torch

    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") and hasattr(module, "Event") else None


def _runs(slots: Any) -> Iterator[_Run]:
    """Slots in ascending order, as runs."""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(slots) != 1) + 1, [slots.size]))
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        yield _Run(int(slots[first]), first, end - first)


def _within(runs: Sequence[_Run], start: int, count: int, split: bool) -> Iterator[_Run]:
    """What of the runs is in a part of the list; single slots where they are not in one piece."""
    for run in runs:
        first = max(run.first, start)
        end = min(run.first + run.length, start + count)
        if end <= first:
            continue
        slot = run.slot + first - run.first
        if split:
            yield from (_Run(slot + i, first + i, 1) for i in range(end - first))
        else:
            yield _Run(slot, first, end - first)


def _copy_row(
    source: torch.Tensor,
    host: torch.Tensor,
    sheet: Sheet,
    row: int,
    of: Any,
    slots: Any,
    runs: Sequence[_Run],
) -> None:
    """One of a sheet's rows, of all blocks: in one pass over memory where runs are long."""
    unit = _unit_bytes(source, host, sheet)
    kind, strides = np.dtype(f"u{unit}"), (sheet.step_bytes, unit)
    rows, into = (
        np.ndarray((count, sheet.row_bytes // unit), kind, memory.numpy(), offset, strides)
        for memory, count, offset in (
            (source, int(of.max()) + 1, sheet.source + row * sheet.source_apart),
            (host, int(slots[-1]) + 1, sheet.target + row * sheet.target_apart),
        )
    )
    # take would make a copy of all rows first where there are gaps between them.
    if sheet.step_bytes == sheet.row_bytes and len(of) >= _LONG_RUN * len(runs):
        for slot, first, length in runs:
            # Every number is in range; clip alone writes to `out` without a copy of it.
            numbers = of[first : first + length]
            np.take(rows, numbers, axis=0, out=into[slot : slot + length], mode="clip")
        return
    at_once = _CACHED_BYTES // sheet.row_bytes
    if at_once < _LONG_RUN:
        for slot, number in zip(slots.tolist(), of.tolist(), strict=True):
            into[slot] = rows[number]
        return
    for start in range(0, len(of), at_once):
        part = slice(start, start + at_once)
        into[slots[part]] = rows[of[part]]


def _sheet_view(
    memory: torch.Tensor, sheet: Sheet, count: int, start: int, apart: int, unit_bytes: int
) -> torch.Tensor:
    """[row, block or slot, units] of so many blocks or slots."""
    import torch

    return torch.empty(0, dtype=_kinds()[unit_bytes], device=memory.device).set_(
        memory.untyped_storage(),
        start // unit_bytes,
        (sheet.count, count, sheet.row_bytes // unit_bytes),
        (apart // unit_bytes, sheet.step_bytes // unit_bytes, 1),
    )


def _unit_bytes(source: torch.Tensor, host: torch.Tensor, sheet: Sheet) -> int:
    """The widest aligned items that a sheet's rows are made of, at both ends."""
    return gcd(
        _WIDEST_BYTES,
        source.data_ptr(),
        host.data_ptr(),
        sheet.source,
        sheet.source_apart,
        sheet.target,
        sheet.target_apart,
        sheet.step_bytes,
        sheet.row_bytes,
    )


def _kinds() -> dict[int, torch.dtype]:
    """Whole numbers of so many bytes."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
