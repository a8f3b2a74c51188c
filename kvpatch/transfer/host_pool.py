"""Slots in host memory for some of a device's KV cache blocks, and the copies into them.

Not a mirror: as many slots as there is room for. The slots of a layer are a tensor like
the layer's own, with slots for blocks, so that whatever can be registered and read on
the device can be here. Tensors that share memory on the device share it here, in the
same order, and each byte of a block is copied once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvpatch._errors import RegistrationRefused
from kvpatch.transfer.device_copies import DeviceCopies
from kvpatch.transfer.host_copies import HostCopies
from kvpatch.transfer.host_memory import free_host_bytes, host_bytes
from kvpatch.transfer.own_copies import Operation, OwnCopies
from kvpatch.transfer.slot_rows import BlockTensor, StorageCopy, rows_of, slot_storage

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


class Copies(Protocol):
    """A way to copy blocks into slots."""

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks into slots, after all that the device was told; some of each."""

    def settle(self) -> None:
        """Waits until all that was saved is in host memory."""


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
        copies: list[StorageCopy] = []
        for storage, copy in storages:
            host = host_bytes(copy.size_bytes, self._device, self)
            for layer, (offset, shape, strides) in copy.places.items():
                like = tensors[layer]
                found[layer] = torch.empty(0, dtype=like.dtype).set_(
                    host.untyped_storage(), offset // like.element_size(), shape, strides
                )
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            whole = whole.set_(storage, 0, (storage.nbytes(),), (1,))
            copies.append(StorageCopy(whole, host, copy.sheets))
        self.tensors: Mapping[str, torch.Tensor] = {layer: found[layer] for layer in tensors}
        self._copies: Copies = (
            HostCopies(copies, self.size_bytes // slots)
            if _is_on_host(self._device)
            else DeviceCopies(copies, self._device, blocks, slots)
        )
        self._try()

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks into slots; in the order of calls, after all that the device was told.

        On a device with streams this only asks for it: what is in a slot may be read
        after :meth:`settle`.

        Raises:
            ValueError: a number that is none of a block or slot, or a slot named twice.
        """
        self._check(blocks, slots)
        if blocks:
            self._copies.save(blocks, slots)

    def use(self, operation: Operation) -> None:
        """From now on copies as the platform does, once that is seen to be right.

        Raises:
            RegistrationRefused: it raises, or what it copies is something else. What copied
                before goes on.
        """
        self.settle()
        before, self._copies = (
            self._copies,
            OwnCopies(operation, self._sources, self.tensors, self._block_dimensions, self._blocks),
        )
        try:
            self._try()
        except RegistrationRefused:
            self._copies = before
            raise

    def settle(self) -> None:
        """Waits until all that was saved is in host memory."""
        self._copies.settle()

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


def _kinds() -> dict[int, torch.dtype]:
    """Whole numbers of so many bytes."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
