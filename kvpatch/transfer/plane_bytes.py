"""Bytes of tensors as whole numbers; a plane's, to be zeroed or to be looked at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane import Content, Counts, Plane, Strides
from kvpatch.geometry.segment_bounds import reach_of
from kvpatch.geometry.segments import Int64Array, Segments
from kvpatch.transfer.one_memory import Bytes

if TYPE_CHECKING:
    import torch

#: What no transfer covers, of planes of several layers: these tokens of these planes.
Tails = Iterable[tuple[Sequence[Plane], Segments]]


def integers_of(item_bytes: int) -> torch.dtype:
    """Whole numbers of so many bytes: 1, 2, 4 or 8."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item_bytes]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as whole numbers, which are compared and copied bit by bit."""
    return tensor.view(integers_of(tensor.element_size()))


def in_units(memory: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """The bytes as units, without a rest that fills none."""
    whole = memory[: memory.numel() // unit_bytes * unit_bytes]
    return whole.view(integers_of(unit_bytes))


def uploaded(numbers: Sequence[Int64Array], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Arrays of numbers on a device, in one copy.

    From pinned memory: a stream that waits for the model must not make this thread wait.
    """
    import torch

    flat = torch.from_numpy(np.concatenate([one.reshape(-1) for one in numbers]))
    if device.type != "cpu" and torch.accelerator.is_available():
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([one.size for one in numbers])
    return tuple(part.view(one.shape) for one, part in zip(numbers, parts, strict=True))


def plane_view(cache: torch.Tensor, plane: Plane) -> torch.Tensor:
    """[block, head, token, channel, byte of the item] of a plane, as a view.

    Args:
        cache: the tensor that the plane was read from.
    """
    import torch

    storage = cache.untyped_storage()
    counts, strides = plane.counts, plane.strides_bytes
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        storage,
        plane.address - storage.data_ptr(),
        (counts.blocks, counts.heads, counts.block_tokens, counts.channels, plane.item_bytes),
        (strides.block, strides.head, strides.token, strides.channel, 1),
    )


def zero_tokens(cache: Bytes, planes: Iterable[Plane], tail: Segments) -> None:
    """Zeroes what a transfer leaves untouched in the last block: stale bytes can be NaN.

    Planes that are strided alike and lie evenly apart are zeroed by one operation.

    Args:
        cache: what the planes lie in.
        tail: local blocks and offsets (:func:`kvpatch.geometry.segments.uncovered_tail`).

    Raises:
        UnplannableCopy: a plane has no such block or token.
    """
    if not len(tail):
        return
    alike: defaultdict[tuple[Content, Counts, Strides, int], set[int]] = defaultdict(set)
    reach = reach_of(tail)[1]
    for plane in planes:
        counts = plane.counts
        if (
            reach.lowest < 0
            or reach.end_block > counts.blocks
            or reach.end_token > counts.block_tokens
        ):
            raise UnplannableCopy(
                f"expected to zero tokens inside {plane}, found blocks up to "
                f"{reach.end_block - 1}, tokens up to {reach.end_token - 1} in a block"
            )
        alike[plane.content, counts, plane.strides_bytes, plane.item_bytes].add(plane.address)
    rows = tail.as_array().tolist()
    for (_, counts, strides, item_bytes), addresses in alike.items():
        for first, apart, count in _evenly_apart(sorted(addresses)):
            for _, _, block, offset, tokens in rows:
                cache.memory.as_strided(
                    (count, counts.heads, tokens, counts.channels, item_bytes),
                    (apart, strides.head, strides.token, strides.channel, 1),
                    # Counted from the start of the storage, of which this memory may be a part.
                    cache.memory.storage_offset()
                    + (first - cache.address + block * strides.block + offset * strides.token),
                ).zero_()


def _evenly_apart(addresses: Sequence[int]) -> Sequence[tuple[int, int, int]]:
    """(first, bytes from one to the next, how many): all of them, or each by itself."""
    apart = {after - before for before, after in pairwise(addresses)}
    if len(apart) > 1:
        return [(address, 0, 1) for address in addresses]
    return [(addresses[0], next(iter(apart), 0), len(addresses))]


def first_tokens(
    cache: torch.Tensor, plane: Plane, blocks: Sequence[int], tokens: int
) -> npt.NDArray[np.uint8]:
    """[token, head, channel, byte] of a table's first tokens, in host memory; waits for the device.

    Args:
        cache: the tensor that the plane was read from.
        blocks: the table's first blocks, as many as the tokens fill.
    """
    import torch

    by_token = plane_view(cache, plane).transpose(1, 2)
    found = by_token[torch.as_tensor(blocks, device=cache.device)].cpu().numpy()
    taken: npt.NDArray[np.uint8] = found.reshape(-1, *found.shape[2:])[:tokens]
    return taken
