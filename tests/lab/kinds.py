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


def halves_of_block(raw: Array, dims: tuple[str, ...]) -> tuple[Array, Array]:
    """Keys and values of a cache, each [block, all that a block has of them]."""
    axis = dims.index("kv") if "kv" in dims else 1  # a slot each, from 0.29 on
    return _pick(raw, axis, 0), _pick(raw, axis, 1)


def _pick(raw: Array, axis: int, number: int) -> Array:
    """[block, items] of one of keys and values, as a view: its block must be dense."""
    half = raw[(slice(None),) * axis + (number,)]
    size = int(np.prod(half.shape[1:]))
    dense = np.empty(half.shape[1:], dtype=raw.dtype).strides
    if half.strides[1:] != dense:
        raise ValueError(f"blocks of {half.shape} with strides {half.strides} are not dense")
    return np.lib.stride_tricks.as_strided(
        half, (half.shape[0], size), (half.strides[0], raw.itemsize)
    )


def slot_planes(keys: Array, values: Array, heads: int, channels: int) -> tuple[Array, ...]:
    """A slot that holds [token, head, channel]: B12X."""
    row = heads * channels
    return tuple(
        _view(half, 0, (row, channels, 1), heads, channels, half.shape[1] // row)
        for half in (keys, values)
    )


def shuffled_planes(keys: Array, values: Array, heads: int, channels: int) -> tuple[Array, ...]:
    """AITER's tiles: keys [head, channel / x, token, x], values [head, token / x, channel, x].

    x are the items of 16 bytes. A plane of keys for each x channels, and blocks of x tokens.
    """
    x = 16 // keys.itemsize
    tokens = keys.shape[1] // (heads * channels)
    if tokens != x or channels % x:
        raise ValueError(f"tiles of {tokens} tokens and {channels} channels, of {x} items")
    tile = tokens * channels
    found = [
        _view(keys, part * tokens * x, (x, tile, 1), heads, x, tokens)
        for part in range(channels // x)
    ]
    return (*found, _view(values, 0, (1, tile, x), heads, channels, tokens))


def _view(
    half: Array, start: int, steps: tuple[int, int, int], heads: int, channels: int, tokens: int
) -> Array:
    """[block, token, head, channel], by the items from one to the next of the last three."""
    size = (half.shape[0], tokens, heads, channels)
    strides = (half.strides[0], *(step * half.itemsize for step in steps))
    return np.lib.stride_tricks.as_strided(half[:, start:], size, strides)


def _by_token(blocks: Array, tokens: int, width: int) -> Array:
    size, strides = (blocks.shape[0], tokens, 1, width), (blocks.strides[0], width, width, 1)
    return np.lib.stride_tricks.as_strided(blocks, size, strides)
