"""Caches whose blocks are no rows of tokens, and where their contents lie in a block."""

from __future__ import annotations

import numpy as np
import torch

from .compare import Array

#: Of an indexer's token: its values, of a byte each, and the scales of them all.
VALUE_BYTES = 128
SCALE_BYTES = 4
INDEXER_BYTES = VALUE_BYTES + SCALE_BYTES


def indexer_planes(tensor: torch.Tensor) -> tuple[Array, ...]:
    """Values, and scales, of an indexer's cache, each [block, token, head, byte].

    A block holds the values of all its tokens, and behind them the scales of all.
    """
    raw = tensor.view(torch.uint8).numpy()
    tokens, bytes_ = raw.shape[-2], raw.shape[-1]
    if bytes_ != INDEXER_BYTES or raw.strides[-2:] != (bytes_, 1):
        raise ValueError(f"an indexer's blocks in {raw.shape} with strides {raw.strides}")
    blocks = np.lib.stride_tricks.as_strided(
        raw, (raw.shape[0], tokens * bytes_), (raw.strides[0], 1)
    )
    values = blocks[:, : tokens * VALUE_BYTES]
    scales = blocks[:, tokens * VALUE_BYTES :]
    return _by_token(values, tokens, VALUE_BYTES), _by_token(scales, tokens, SCALE_BYTES)


def _by_token(blocks: Array, tokens: int, width: int) -> Array:
    size, strides = (blocks.shape[0], tokens, 1, width), (blocks.strides[0], width, width, 1)
    return np.lib.stride_tricks.as_strided(blocks, size, strides)
