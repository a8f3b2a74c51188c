"""Host blocks for some of a device's KV cache blocks, and the copies into them.

Not a mirror: as many host blocks as there is room for. The host blocks of a layer are a tensor
like the layer's own, in which they stand for blocks, so that whatever can be registered and
read on the device can be here. Tensors that share memory on the device share it here, in the
same order, and each byte of a block is copied once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpatch.core.errors import RegistrationRefused, UnexpectedCaches
from kvpatch.geometry.segments import kernel_blocks
from kvpatch.host_buffer.block_copies import (
    BlockCopies,
    BlockTensor,
    StorageCopy,
    host_storage,
    rows_of,
)
from kvpatch.transfer.one_memory import storage_of
from kvpatch.transfer.plane_bytes import as_integers
from kvpatch.transfer.storageless import fetch, has_storage, shown

if TYPE_CHECKING:
    import torch


_LOG = logging.getLogger("kvpatch.host_buffer")

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
#: What torch says where it cannot.
CANNOT = (
    RuntimeError,  # and NotImplementedError, which is one
    AttributeError,
    TypeError,
    ValueError,
    IndexError,
)


def block_bytes(
    tensors: Mapping[str, torch.Tensor], block_dimensions: Mapping[str, int], blocks: int
) -> int:
    """Returns the bytes of one block over all layers; counts shared memory once.

    Args:
        block_dimensions: which of each tensor's dimensions counts blocks.
        blocks: how many the engine names; a tensor may have each as several kernel blocks.

    Raises:
        RegistrationRefused: a tensor is not laid out in blocks.
    """
    storages = _by_storage(tensors, block_dimensions, blocks)
    return sum(row.step_bytes for _, found in storages for row in rows_of(found, blocks))


def mirror_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the bytes of a buffer like stock's: all blocks, and a tensor for every layer."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class HostPool:
    """Host blocks for a device's blocks, one tensor a layer.

    Args:
        tensors: every layer's on the device.
        block_dimensions, blocks: as for :func:`block_bytes`.
        is_there_late: whether memory is put behind a block when it is handed out: none may be
            looked at before it is saved, and the first one that is tries the copies.

    Attributes:
        tensors: like those on the device, in host memory, with host blocks for blocks.
        host_blocks: how many there are.
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
        host_blocks: int,
        *,
        is_there_late: bool = False,
    ) -> None:
        import torch

        self.host_blocks = host_blocks
        self._blocks = blocks
        self._is_tried = False
        self._sources = tensors
        self._block_dimensions = block_dimensions
        self._device: torch.device = next(iter(tensors.values())).device
        storages = [
            (storage, host_storage(found, blocks, host_blocks))
            for storage, found in _by_storage(tensors, block_dimensions, blocks)
        ]
        self.size_bytes = sum(copy.size_bytes for _, copy in storages)
        free = free_host_bytes()
        if free is not None and self.size_bytes > free:
            raise RegistrationRefused(
                f"{host_blocks} blocks of host buffer take {self.size_bytes} bytes, and the host "
                f"has {free} free",
                "set KVPATCH_HOST_BUFFER_BYTES to less",
            )
        found: dict[str, torch.Tensor] = {}
        copies: list[StorageCopy] = []
        for storage, copy in storages:
            host = host_bytes(copy.size_bytes, self._device, self)
            for layer, (offset, shape, strides) in copy.places.items():
                like = tensors[layer]
                found[layer] = torch.empty(0, dtype=like.dtype).set_(
                    host.untyped_storage(), offset // like.element_size(), shape, strides
                )
            if storage is not None:
                whole = storage_of(tensors[next(iter(copy.places))]).memory
                copies.append(StorageCopy(whole, host, copy.rows))
        self.tensors: Mapping[str, torch.Tensor] = {layer: found[layer] for layer in tensors}
        #: None where tensors have no storage.
        self._copies: BlockCopies | None = None
        if len(copies) == len(storages):
            self._copies = BlockCopies(copies, self._device, blocks, host_blocks)
        if not is_there_late:  # tries the last block, and leaves none of it
            host_block, block = host_blocks - 1, blocks - 1
            self._save_and_look([block], [host_block])
            for layer in self.tensors:
                self._pair(layer, block, host_block)[1].zero_()
            self._is_tried = True

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks into host blocks, in the order of calls; after what the device was told.

        On a device with streams this only asks for it: what is in a host block may be read
        after :meth:`settle`.

        Raises:
            ValueError: a number that is none of a block or host block, or a host block twice.
            UnexpectedCaches: the first block of all was not itself in its host block.
        """
        distinct = len(set(host_blocks))
        if len(blocks) != len(host_blocks) or distinct != len(host_blocks):
            raise ValueError(
                f"{len(blocks)} blocks for {distinct} of {len(host_blocks)} host blocks"
            )
        for numbers, count, what in (
            (blocks, self._blocks, "block"),
            (host_blocks, self.host_blocks, "host block"),
        ):
            outside = [number for number in numbers if not 0 <= number < count]
            if outside:
                raise ValueError(f"{what} {outside[0]} of {count}")
        if blocks and self._is_tried:
            self._copy(blocks, host_blocks)
        elif blocks:
            self._save_and_look(blocks, host_blocks)
            self._is_tried = True

    def settle(self) -> None:
        """Waits until all that was saved is in host memory."""
        if self._copies is not None:
            self._copies.settle()

    def _copy(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        import torch

        if self._copies is not None:
            self._copies.save(blocks, host_blocks)
            return
        for layer in {id(source): layer for layer, source in self._sources.items()}.values():
            source, dimension = self._sources[layer], self._block_dimensions[layer]
            parts = source.shape[dimension] // self._blocks
            of, into = (kernel_blocks(ids, parts) for ids in (blocks, host_blocks))
            found = fetch(source, dimension, of).movedim(0, dimension)
            # Not every kind of numbers can be copied by index on every host.
            target, numbers = as_integers(self.tensors[layer]), torch.from_numpy(into)
            target.index_copy_(dimension, numbers, as_integers(found))

    def _save_and_look(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks and looks at the first one.

        Raises:
            UnexpectedCaches: it cannot be copied, or is another one.
        """
        import torch

        try:
            pairs = {layer: self._pair(layer, blocks[0], host_blocks[0]) for layer in self.tensors}
            for here, there in pairs.values():
                # Not by chance what is to come.
                as_integers(there).copy_(as_integers(here).bitwise_not())
            self._copy(blocks, host_blocks)
            self.settle()
            wrong = [
                layer for layer, pair in pairs.items() if not torch.equal(*map(as_integers, pair))
            ]
        except CANNOT as error:
            raise UnexpectedCaches(
                f"KV caches on {self._device} cannot be copied to host memory: {error}"
            ) from error
        if wrong:
            raise UnexpectedCaches(
                f"a block of {', '.join(wrong)} on {self._device} is not itself after it was "
                "copied to host memory"
            )

    def _pair(self, layer: str, block: int, host_block: int) -> tuple[torch.Tensor, torch.Tensor]:
        dimension = self._block_dimensions[layer]
        source = self._sources[layer]
        parts = source.shape[dimension] // self._blocks
        if has_storage(source):
            here = source.narrow(dimension, block * parts, parts).cpu()
        else:
            here = fetch(source, dimension, kernel_blocks([block], parts)).movedim(0, dimension)
        return here, self.tensors[layer].narrow(dimension, host_block * parts, parts)


def _by_storage(
    tensors: Mapping[str, torch.Tensor], block_dimensions: Mapping[str, int], blocks: int
) -> Iterator[tuple[Any, list[BlockTensor]]]:
    """(storage, tensors in it), in the order of the layers; None for one without a storage."""
    found: dict[tuple[str, int], tuple[Any, list[BlockTensor]]] = {}
    for layer, tensor in tensors.items():
        dimension = block_dimensions[layer]
        parts, rest = divmod(tensor.shape[dimension], blocks)
        if rest or not parts:
            raise UnexpectedCaches(
                f"layer {layer}: {tensor.shape[dimension]} blocks in a tensor of shape "
                f"{tuple(tensor.shape)}, where a multiple of {blocks} was planned"
            )
        storage, offset, strides = None, 0, shown(tensor).stride()
        place = ("tensor", id(tensor))
        if has_storage(tensor):
            storage, strides = tensor.untyped_storage(), tensor.stride()
            offset = tensor.data_ptr() - storage.data_ptr()
            place = ("storage", storage.data_ptr())
        _, members = found.setdefault(place, (storage, []))
        members.append(
            BlockTensor(
                layer,
                offset,
                tuple(tensor.shape),
                tuple(strides),
                tensor.element_size(),
                dimension,
                parts,
            )
        )
    yield from found.values()


def free_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Returns the bytes that this process can still allocate, within its container's limit.

    None if that is unknown.
    """
    found = [1024 * number for number in _numbers_in(meminfo, "MemAvailable:")]
    limit, current = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and current.is_file() and limit.read_text().strip() != "max":
        # Cached files count as taken, and are given back when they must be.
        cached = sum(_numbers_in(cgroup / "memory.stat", "inactive_file "))
        found.append(max(0, int(limit.read_text()) - int(current.read_text()) + cached))
    return min(found, default=None)


def _numbers_in(path: Path, name: str) -> list[int]:
    """Returns the number of each line that begins with a name; none where there is no file."""
    lines = path.read_text().splitlines() if path.is_file() else ()
    return [int(line.split()[1]) for line in lines if line.startswith(name)]


def host_bytes(size_bytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Allocates zeroed host memory to copy to from a device, one-dimensional ``uint8``.

    Pinned as long as `owner` lives, where the device's framework can do that. Written to
    at once, so that memory that is not there is missed now and not in a request.
    """
    import torch

    if device.type == "cuda":
        # torch's own allocator of pinned memory takes the next power of two.
        memory = _huge(size_bytes)
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(memory.data_ptr(), size_bytes, 0)
        if int(error) == 0:
            # Kept until then: memory must not be freed while it is registered.
            unpin = runtime.cudaHostUnregister
            weakref.finalize(owner, lambda kept: unpin(kept.data_ptr()), memory)
        else:
            _LOG.warning("%d bytes of host buffer cannot be pinned: %s", size_bytes, error)
            forget_last_error(device)
        return memory
    if device.type != "cpu":
        try:
            return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _LOG.info("%s has no pinned memory: %s", device.type, error)
    return _huge(size_bytes)


def forget_last_error(device: torch.device) -> None:
    """Clears this thread's error of a CUDA call that torch has not checked.

    The runtime keeps it until somebody asks, and torch asks behind each launch of a kernel: the
    next one, whatever for, would raise it as its own.
    """
    import torch

    try:
        torch.empty(1, device=device).add_(1)
    except RuntimeError as error:  # cleared, as torch asked for it
        _LOG.debug("CUDA's last error was %s", error)


def _huge(size_bytes: int) -> torch.Tensor:
    """Zeroes, by numpy, which asks for huge pages: what is copied lies all over it."""
    import torch

    return torch.from_numpy(np.empty(size_bytes, dtype=np.uint8)).fill_(0)
