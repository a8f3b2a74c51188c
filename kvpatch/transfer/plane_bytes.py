"""Bytes of tensors as whole numbers; a plane's, to be zeroed or to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import Int64Array, Segments

if TYPE_CHECKING:
    import torch


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


def zero_tokens(cache: torch.Tensor, plane: Plane, tail: Segments) -> None:
    """Zeroes what a transfer leaves untouched in the last block: stale bytes can be NaN.

    Args:
        cache: the tensor that the plane was read from.
        tail: local blocks and offsets (:func:`kvpatch.geometry.segments.uncovered_tail`).
    """
    if not len(tail):
        return
    view = plane_view(cache, plane)
    for _, _, block, offset, tokens in tail.as_array().tolist():
        view[block, :, offset : offset + tokens].zero_()


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
