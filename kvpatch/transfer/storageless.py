"""Caches on devices whose tensors have no storage (torch_xla's): nothing there has an address.

Whole blocks come and go by ``index_select`` and ``index_copy_`` along the dimension that
counts them, which is all that such a device is asked for. How their bytes lie on the
device is nobody's business but its own: geometry is shown a tensor on "meta" of the same
shape with blocks outermost, which is how blocks lie in host memory on their way.

Such a device puts off what it is told, and compiles all that is pending as one program. It is
therefore told to begin before blocks are fetched and after they are stored: a program is then
one copy, compiled once for a shape, and a store changes the cache where it lies. What is left
pending is compiled anew with each store, copies the whole cache, and ends in the model's step.

It may also make one NaN of all: what is no number stays none, and has other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import Int64Array, Segments
from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer.caches import Caches, done
from kvpatch.transfer.one_memory import storage_of
from kvpatch.transfer.place import place_in_host_memory
from kvpatch.transfer.plane_bytes import Tails, as_integers, zero_tokens

if TYPE_CHECKING:
    import torch


def has_storage(tensor: torch.Tensor) -> bool:
    try:
        address = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # and NotImplementedError, which is one
        return False
    return bool(address) or not tensor.numel()


def shown(tensor: torch.Tensor, outermost: int = 0) -> torch.Tensor:
    """A tensor on "meta" in the form of one without a storage, the given dimension outermost."""
    import torch

    shape = list(tensor.shape)
    made = torch.empty([shape.pop(outermost), *shape], dtype=tensor.dtype, device="meta")
    return made.movedim(0, outermost)


def fetch(tensor: torch.Tensor, dimension: int, blocks: Int64Array) -> torch.Tensor:
    """Copies some blocks to host memory, [block, the other dimensions]."""
    _begin(tensor)
    numbers = _numbers(tensor, blocks)
    found = tensor.index_select(dimension, numbers).cpu().movedim(dimension, 0)
    return found[: len(blocks)].contiguous()


def store(tensor: torch.Tensor, dimension: int, blocks: Int64Array, found: torch.Tensor) -> None:
    """Puts blocks as :func:`fetch` returns them onto the device."""
    import torch

    numbers = _numbers(tensor, blocks)
    # Once more the last one, in the places of the numbers that were added.
    more = found[-1:].expand(len(numbers) - len(blocks), *found.shape[1:])
    rows = torch.cat((found, more)).movedim(0, dimension).contiguous()
    tensor.index_copy_(dimension, numbers, rows.to(tensor.device))
    _begin(tensor)


def _begin(tensor: torch.Tensor) -> None:
    """Starts the work that was queued on a device, where the device would put it off (XLA)."""
    if tensor.device.type == "xla":
        import torch_xla

        torch_xla.sync()


def _small_numbers(like: torch.Tensor) -> torch.Tensor:
    """Numbers that elements of every kind can be, in the shape of `like`: 1 to 7, by turns."""
    import torch

    return (torch.arange(like.numel()) % 7 + 1).to(like.dtype).view(like.shape)


def _numbers(tensor: torch.Tensor, blocks: Int64Array) -> torch.Tensor:
    """Block numbers on the device, the last one repeated up to a power of two.

    Such a device compiles for each shape anew.
    """
    import torch

    count = 1 << (len(blocks) - 1).bit_length()
    padded = np.concatenate((blocks, np.repeat(blocks[-1:], count - len(blocks))))
    return torch.from_numpy(padded).to(tensor.device)


class StoragelessCaches:
    """The engine's own caches, which staged copies write to by way of host memory.

    A block is fetched, what is read is put into it, and it is stored again: all of it is
    the request's that is read for, so that nobody writes to it meanwhile.

    Args:
        tensors: every layer's on the device.
        shown: what geometry was shown of them.
        block_dimensions: which of each tensor's dimensions counts blocks.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        shown: Mapping[str, torch.Tensor],
        block_dimensions: Mapping[str, int],
    ) -> None:
        self._tensors = tensors
        self._shown = shown
        self._block_dimensions = block_dimensions

    def find_wrong(self) -> list[str]:
        """Layers whose last block is not what was stored there; all are as before after it.

        Raises:
            RuntimeError: the device cannot copy blocks of this kind, or as torch says it.
        """
        import torch

        wrong = []
        for layer, tensor in self._tensors.items():
            dimension = self._block_dimensions[layer]
            last = np.array([tensor.shape[dimension] - 1])
            before = fetch(tensor, dimension, last)
            # Whatever lies there may be no number, and what it is not may be none either.
            other = _small_numbers(before)
            store(tensor, dimension, last, other)
            found = fetch(tensor, dimension, last)
            store(tensor, dimension, last, before)
            if not torch.equal(as_integers(found), as_integers(other)):
                wrong.append(layer)
        return wrong

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def mark(self) -> None:
        """Returns nothing: such a device does its work in the order in which it was queued."""

    def place(
        self, staging: torch.Tensor, placements: tuple[Placement, ...], after: None
    ) -> Callable[[], bool]:
        """Does :meth:`kvpatch.transfer.caches.Caches.place`; the copy is over when this returns."""
        import torch

        by_tensor: dict[int, list[Placement]] = {}
        for placement in placements:
            if len(placement.segments):
                of = by_tensor.setdefault(id(self._tensors[placement.layer]), [])
                of.append(placement)
        for found in by_tensor.values():
            layer = found[0].layer
            touched = np.unique(np.concatenate([p.segments.local_block for p in found]))
            blocks = fetch(self._tensors[layer], self._block_dimensions[layer], touched)
            raw = blocks.view(-1).view(torch.uint8).numpy()
            for placement in found:
                place_in_host_memory(
                    staging.numpy(),
                    raw,
                    self._shown[placement.layer].data_ptr(),
                    replace(placement, segments=_renumbered(placement.segments, touched)),
                )
            store(self._tensors[layer], self._block_dimensions[layer], touched, blocks)
        return done

    def zero(self, tails: Tails, after: None) -> Callable[[], bool]:
        """Does :meth:`kvpatch.transfer.caches.Caches.zero`; the copy is over when this returns."""
        for planes, tail in tails:
            for plane in planes if len(tail) else ():
                self._zero(plane, tail)
        return done

    def _zero(self, plane: Plane, tail: Segments) -> None:
        tensor, dimension = self._tensors[plane.layer], self._block_dimensions[plane.layer]
        touched = np.unique(tail.local_block)
        blocks = fetch(tensor, dimension, touched)
        counts = plane.counts._replace(blocks=len(touched))
        place = replace(plane, address=plane.address + blocks.data_ptr(), counts=counts)
        zero_tokens(storage_of(blocks), place, _renumbered(tail, touched))
        store(tensor, dimension, touched, blocks)

    def settle(self) -> None:
        """Does nothing: all copies are over already."""

    def give_up(self, copies: Iterable[Callable[[], bool]]) -> None:
        """Does nothing: all copies are over already."""


def _renumbered(segments: Segments, blocks: Int64Array) -> Segments:
    """The same, with places in a list of blocks for their numbers."""
    return replace(segments, local_block=np.searchsorted(blocks, segments.local_block))


#: What a read is placed in.
AnyCaches = Caches | StoragelessCaches
