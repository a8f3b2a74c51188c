"""Recurrent state (Mamba) in kvcached's pool of a hybrid model.

Its blocks are blocks of attention's, of another group: the i-th layer of every group has one
place in a row of all layers, in which a state lies as a page of its own. A block that is cut
into kernel blocks is several rows of attention's, and one of states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from kvpatch._errors import RegistrationRefused
from kvpatch.geometry import Row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class State:
    """One layer's recurrent state in a row's pool.

    Attributes:
        place: among the parts of a row.
        tensors: as they were handed to the registration.
        offsets: of each tensor, in bytes from the place's beginning.
    """

    place: int
    tensors: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]

    def __str__(self) -> str:
        shapes = [(tuple(t.shape[1:]), str(t.dtype)) for t in self.tensors]
        return f"{self.place}:{list(zip(shapes, self.offsets, strict=True))}"


def states_in(
    kv_caches: Mapping[str, Any], attention: Mapping[str, Any], row: Row, parts: int
) -> dict[str, State]:
    """The layers that are no attention, as states in the rows of the others.

    Args:
        parts: rows to a block.

    Raises:
        RegistrationRefused: one lies elsewhere, or otherwise.
    """
    page_bytes = row.part_bytes[0] * parts
    found = {}
    for name in kv_caches.keys() - attention.keys():
        cache = kv_caches[name]
        tensors: Sequence[Any] = cache if isinstance(cache, list | tuple) else (cache,)
        start = min(tensor.data_ptr() for tensor in tensors) - row.address
        place = start // page_bytes
        offsets = tuple(tensor.data_ptr() - row.address - place * page_bytes for tensor in tensors)
        fits = (
            start % page_bytes == 0
            and place < len(row.layers)
            and set(row.part_bytes) == {row.part_bytes[0]}
            and all(
                tensor.shape[0] * parts == row.rows
                and tensor.stride(0) * tensor.element_size() == row.row_bytes * parts
                and offset + _reach(tensor) <= page_bytes
                for tensor, offset in zip(tensors, offsets, strict=True)
            )
        )
        if not fits:
            raise RegistrationRefused(
                f"{name} is no attention cache, and no state in a page of {page_bytes} bytes of "
                f"kvcached's contiguous layout: expected one of the {len(row.layers)} places of "
                f"{row.rows // parts} rows of {row.row_bytes * parts} bytes, found "
                f"{[(tuple(t.shape), tuple(t.stride()), str(t.dtype)) for t in tensors]} at byte "
                f"{start}; set KVCACHED_CONTIGUOUS_LAYOUT=false"
            )
        found[name] = State(place, tuple(tensors), offsets)
    return dict(sorted(found.items()))


def _reach(tensor: torch.Tensor) -> int:
    """Bytes of one block's, from the first to past the last."""
    axes = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    items = 1 + sum((size - 1) * stride for size, stride in axes)
    return int(items * tensor.element_size())


def states_digest(places: str, states: Mapping[str, State], specs: Mapping[str, Any]) -> str:
    """What both sides must have alike: who shares a place, and every state's shape and type.

    Args:
        places: the digest of attention's places.
        specs: of the layers with states, in the release's plan: from 0.27 on a tensor is a page
            of bytes, of whatever states.
    """
    if not states:
        return places
    planned = {name: (specs[name].shapes, specs[name].dtypes) for name in states}
    told = [places, *(f"{name}={state}:{planned[name]}" for name, state in states.items())]
    return sha256("\n".join(told).encode()).hexdigest()[:16]
