"""Recurrent state (Mamba) of a hybrid model: in which pages it lies, here and at a peer.

Its blocks are blocks of attention's, of another group: the i-th layer of every group has one
place in the memory (a tensor, or a part of a cross-layer block), in which a block of a layer's
states is a page as large as attention's block. The states lie one behind the other from the
page's beginning, and need not fill it. A block that is cut into kernel blocks is several of
attention's, and one page of states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any

from kvpatch.core.errors import RegistrationRefused
from kvpatch.geometry.cross_layer_blocks import CrossLayerBlocks
from kvpatch.geometry.tensor_facts import extent_bytes
from kvpatch.worker.state_division import StateDivision

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StatePages:
    """The place of one layer's states on one rank.

    Attributes:
        address: of the first block's page.
        stride_bytes: from one block's page to the next.
        blocks: how many there are, as ids count them.
        sizes_bytes: of each state in a page, from its beginning on.
        division: how ranks share them out.
    """

    address: int
    stride_bytes: int
    blocks: int
    sizes_bytes: tuple[int, ...]
    division: StateDivision = StateDivision()

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes_bytes)


@dataclass(frozen=True)
class StateInPool:
    """The recurrent state of one layer in a pool of cross-layer blocks.

    Attributes:
        place: among the parts of a block.
        tensors: as they were handed to the registration.
        offsets: of each tensor, in bytes from the place's beginning.
    """

    place: int
    tensors: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]


def states_in(
    kv_caches: Mapping[str, Any], attention: Mapping[str, Any], pool: CrossLayerBlocks, parts: int
) -> dict[str, StateInPool]:
    """Returns the layers that are no attention, as states in the cross-layer blocks of the others.

    Args:
        parts: cross-layer blocks to one of the blocks that ids count.
    """
    page_bytes = pool.layer_bytes[0] * parts
    found = {}
    for name in kv_caches.keys() - attention.keys():
        cache = kv_caches[name]
        tensors = tensors_of(cache)
        start = min(tensor.data_ptr() for tensor in tensors) - pool.address
        place = start // page_bytes
        offsets = tuple(tensor.data_ptr() - pool.address - place * page_bytes for tensor in tensors)
        fits = (
            start % page_bytes == 0
            and place < len(pool.layers)
            and set(pool.layer_bytes) == {pool.layer_bytes[0]}
            and all(
                tensor.shape[0] * parts == pool.blocks
                and tensor.stride(0) * tensor.element_size() == pool.block_bytes * parts
                and offset + _reach(tensor) <= page_bytes
                for tensor, offset in zip(tensors, offsets, strict=True)
            )
        )
        if not fits:
            raise RegistrationRefused(
                f"{name} is no attention cache, and no state in a page of {page_bytes} bytes of "
                f"kvcached's contiguous layout: expected one of the {len(pool.layers)} places of "
                f"{pool.blocks // parts} rows of {pool.block_bytes * parts} bytes, found "
                f"{[(tuple(t.shape), tuple(t.stride()), str(t.dtype)) for t in tensors]} at byte "
                f"{start}",
                "set KVCACHED_CONTIGUOUS_LAYOUT=false",
            )
        found[name] = StateInPool(place, tensors, offsets)
    return dict(sorted(found.items()))


def tensors_of(cache: Any) -> tuple[Any, ...]:
    """Returns a layer's tensors: one, or (<= 0.26) one for each of its states."""
    return tuple(cache) if isinstance(cache, list | tuple) else (cache,)


def _reach(tensor: torch.Tensor) -> int:
    """Returns the bytes of one block, from its first element to past its last."""
    axes = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    # In elements, of which one has one.
    return int(extent_bytes(axes, 1) * tensor.element_size())


def sizes_of_states(spec: Any) -> tuple[int, ...]:
    """Returns the bytes of each state of a layer in a block, by its spec."""
    states = zip(spec.shapes, spec.dtypes, strict=True)
    return tuple(prod(shape) * dtype.itemsize for shape, dtype in states)


def pages_of(cache: Any, spec: Any) -> StatePages | None:
    """The pages of a layer's states; None where they do not lie as every peer takes them to.

    Args:
        cache: what was handed to the registration: a tensor for each state (<= 0.26), or one
            of pages of bytes.
        spec: of the layer, in the release's plan.
    """
    tensors = tensors_of(cache)
    sizes = sizes_of_states(spec)
    first = tensors[0]
    stride_bytes = first.stride(0) * first.element_size()
    if len(tensors) == 1 and len(sizes) > 1:
        lies_right = _reach(first) >= sum(sizes)
    else:
        starts = [first.data_ptr() + sum(sizes[:number]) for number in range(len(sizes))]
        lies_right = [tensor.data_ptr() for tensor in tensors] == starts and all(
            _reach(tensor) == size
            and prod(tensor.shape[1:]) * tensor.element_size() == size
            and tensor.stride(0) * tensor.element_size() == stride_bytes
            and tensor.shape[0] == first.shape[0]
            for tensor, size in zip(tensors, sizes, strict=True)
        )
    if not lies_right or sum(sizes) > stride_bytes:
        return None
    return StatePages(first.data_ptr(), stride_bytes, int(first.shape[0]), sizes)


def states_digest(places: str, states: Mapping[str, int], specs: Mapping[str, Any]) -> str:
    """Returns a digest of who shares a place, and of every state's shape and type.

    Args:
        places: the digest of attention's places.
        states: the place of each layer that has states.
        specs: of these layers, in the release's plan: from 0.27 on a tensor is a page of bytes,
            of whatever states.
    """
    if not states:
        return places
    planned = {name: (specs[name].shapes, specs[name].dtypes) for name in states}
    told = [places, *(f"{name}={place}:{planned[name]}" for name, place in sorted(states.items()))]
    return sha256("\n".join(told).encode()).hexdigest()[:16]
