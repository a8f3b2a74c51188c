"""Zeroes what a transfer leaves untouched in the last block: stale bytes can be NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpatch.geometry import Plane, Segments

if TYPE_CHECKING:
    import torch


def zero_tokens(cache: torch.Tensor, plane: Plane, tail: Segments) -> None:
    """Zeroes whole tokens of one plane, on the device that the cache lies on.

    Args:
        cache: the tensor that the plane was read from.
        tail: local blocks and offsets (:func:`kvpatch.geometry.uncovered_tail`).
    """
    for _, _, block, offset, tokens in tail.as_array().tolist():
        _bytes_of(cache, plane, block, offset, tokens).zero_()


def _bytes_of(
    cache: torch.Tensor, plane: Plane, block: int, offset: int, tokens: int
) -> torch.Tensor:
    """[head, token, channel, byte] of a run of tokens in one block, as a view."""
    import torch

    storage = cache.untyped_storage()
    start = plane.address - storage.data_ptr() + plane.byte_offset(block, 0, offset, 0)
    strides = plane.strides_bytes
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        storage,
        start,
        (plane.counts.heads, tokens, plane.counts.channels, plane.item_bytes),
        (strides.head, strides.token, strides.channel, 1),
    )
