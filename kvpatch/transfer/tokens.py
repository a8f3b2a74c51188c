"""Tokens out of the engine's own cache, into host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpatch.geometry import Plane

if TYPE_CHECKING:
    import torch


def first_tokens(
    cache: torch.Tensor, plane: Plane, blocks: Sequence[int], tokens: int
) -> npt.NDArray[np.uint8]:
    """[token, head, channel, byte] of a table's first tokens; waits for the device.

    Args:
        cache: the tensor that the plane was read from.
        blocks: the table's first blocks, as many as the tokens fill.
    """
    import torch

    storage = cache.untyped_storage()
    counts, strides = plane.counts, plane.strides_bytes
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        storage,
        plane.address - storage.data_ptr(),
        (counts.blocks, counts.block_tokens, counts.heads, counts.channels, plane.item_bytes),
        (strides.block, strides.token, strides.head, strides.channel, 1),
    )
    found = whole[torch.as_tensor(blocks, device=cache.device)].cpu().numpy()
    taken: npt.NDArray[np.uint8] = found.reshape(-1, *found.shape[2:])[:tokens]
    return taken
