"""Caches whose blocks are no rows of tokens, and where their contents lie in a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .compare import Array

if TYPE_CHECKING:
    from .case import EngineSpec

#: Of an indexer's token: its values, of a byte each, and the scales of them all.
VALUE_BYTES = 128
SCALE_BYTES = 4
INDEXER_BYTES = VALUE_BYTES + SCALE_BYTES


def indexer_planes(tensor: torch.Tensor) -> tuple[Array, ...]:
    """Values, and scales, of an indexer's cache, each [block, token, head, byte]."""
    return values_then_scales(tensor, VALUE_BYTES, SCALE_BYTES)


def values_then_scales(
    tensor: torch.Tensor, value_bytes: int, scale_bytes: int
) -> tuple[Array, ...]:
    """Values, and scales, each [block, row, head, byte].

    A block holds the values of all its rows, and behind them the scales of all.
    """
    raw = tensor.view(torch.uint8).numpy()
    rows, bytes_ = raw.shape[-2], raw.shape[-1]
    if bytes_ != value_bytes + scale_bytes or raw.strides[-2:] != (bytes_, 1):
        raise ValueError(f"values and scales in {raw.shape} with strides {raw.strides}")
    blocks = np.lib.stride_tricks.as_strided(
        raw, (raw.shape[0], rows * bytes_), (raw.strides[0], 1)
    )
    values = blocks[:, : rows * value_bytes]
    scales = blocks[:, rows * value_bytes :]
    return _by_token(values, rows, value_bytes), _by_token(scales, rows, scale_bytes)


def rows_of_states(tensor: torch.Tensor, spec: EngineSpec, states: int = 1) -> tuple[Array, ...]:
    """[block, row, head, byte] of a tensor of [block, head, state, content], as it is.

    Args:
        states: to a row, one behind the other.
    """
    raw = tensor.view(torch.uint8).numpy()
    if raw.strides[-1] != 1:
        raise ValueError(f"rows of {raw.shape} with strides {raw.strides}")
    by_row = raw.transpose(0, 2, 1, 3)
    if states == 1:
        return (by_row,)
    return tuple(by_row[:, number::states] for number in range(states))


def fp4_planes(tensor: torch.Tensor) -> tuple[Array, ...]:
    """FlashInfer's NVFP4: of keys, and of values, all heads' packed values, then their scales."""
    slots = tensor.view(torch.uint8)
    sides = slots.split(slots.shape[1] // 2, dim=1)
    return tuple(plane for side in sides for plane in _fp4(side.numpy(), None))


def fp4_planes_by_head(tensor: torch.Tensor) -> tuple[Array, ...]:
    """MiniMax-M3's: of each head packed keys, their scales, packed values, and theirs."""
    raw = tensor.view(torch.uint8).numpy()
    return tuple(plane for side in (0, 1) for plane in _fp4(raw[:, side::2], raw.strides[1] * 2))


def _fp4(raw: Array, head_bytes: int | None) -> tuple[Array, Array]:
    """Values, and scales, [block, token, head, byte], of one side [block, head, token, byte].

    Args:
        head_bytes: from one head's values to the next one's; None where all scales are behind the
            values of all heads.
    """
    blocks, heads, tokens, width = raw.shape
    values = width * 8 // 9
    scales = width - values
    if raw.strides[2:] != (width, 1) or raw.strides[1] != (head_bytes or tokens * width):
        raise ValueError(f"NVFP4 in {raw.shape} with strides {raw.strides}")
    start = tokens * values * (1 if head_bytes else heads)
    flat = np.lib.stride_tricks.as_strided(raw, (blocks, start + 1), (raw.strides[0], 1))
    size = blocks, tokens, heads
    return (
        _strided(flat, (*size, values), values, head_bytes or tokens * values),
        _strided(flat[:, start:], (*size, scales), scales, head_bytes or tokens * scales),
    )


def _strided(flat: Array, size: tuple[int, ...], token_bytes: int, head_bytes: int) -> Array:
    strides = (flat.strides[0], token_bytes, head_bytes, 1)
    return np.lib.stride_tricks.as_strided(flat, size, strides)


def split_slots(tensor: torch.Tensor) -> tuple[Array, Array]:
    """Keys and values of a cache of two slots of 2-byte items, each [block, all of a slot]."""
    return halves_of_block(tensor.view(torch.int16).numpy().view(np.uint16), ("block", "slot"))


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
    return tile_planes(keys, values, heads, channels)


def tile_planes(keys: Array, values: Array, heads: int, channels: int) -> tuple[Array, ...]:
    """ROCm's: keys [head, channel / x, token, x], values [head, channel, token].

    x are the items of 16 bytes. A plane of keys for each x channels.
    """
    x = 16 // keys.itemsize
    tokens = keys.shape[1] // (heads * channels)
    tile = tokens * channels
    found = [
        _view(keys, part * tokens * x, (x, tile, 1), heads, x, tokens)
        for part in range(channels // x)
    ]
    return (*found, _view(values, 0, (1, tile, tokens), heads, channels, tokens))


class PlacedPlane:
    """[block, token, head, channel] of a plane that no strides of four axes describe.

    What is taken out of it is a copy.

    Args:
        flat: [block, head, item], as memory has them.
        places: [token, channel] the item of a block and head.
    """

    def __init__(self, flat: Array, places: Array) -> None:
        self._flat, self._places = flat, places
        self._heads = np.arange(flat.shape[1])
        self.shape = (flat.shape[0], places.shape[0], flat.shape[1], places.shape[1])
        self.itemsize, self.dtype = flat.itemsize, flat.dtype

    def _where(self, key: Any) -> tuple[Any, ...]:
        block, token = key if isinstance(key, tuple) else (key, None)
        if token is not None:  # as many tokens as blocks
            block = np.asarray(block)[..., None, None]
            return block, self._heads[:, None], self._places[token][..., None, :]
        block = np.asarray(block)[..., None, None, None]
        return block, self._heads[:, None], self._places[:, None, :]

    def __getitem__(self, key: Any) -> Array:
        return self._flat[self._where(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._flat[self._where(key)] = value


def amx_planes(
    keys: Array, values: Array, tokens: int, channels: int
) -> tuple[PlacedPlane, PlacedPlane]:
    """The CPU backend's with AMX, items of 2 bytes: [block, head, item] of each.

    Keys [16 tokens, 2 channels, token, channel], values [16 channels, 2 tokens, channel, token].
    A stand-in: this processor has no AMX. tests/upstream/test_amx_packing.py holds it against the
    function that packs them in a wheel of vLLM's.
    """
    token, channel = np.ogrid[:tokens, :channels]
    of_keys = token // 16 * 16 * channels + channel // 2 * 32 + token % 16 * 2 + channel % 2
    of_values = channel // 16 * 16 * tokens + token // 2 * 32 + channel % 16 * 2 + token % 2
    return PlacedPlane(keys, of_keys), PlacedPlane(values, of_values)


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
