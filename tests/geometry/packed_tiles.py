"""How the CPU backend's matrix kernels (AMX) pack keys and values, in numpy's words.

A stand-in for what packs them: ``tests/upstream/test_amx_packing.py`` holds it against the
function that a wheel of vLLM's has for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]


def packed_keys(rows: Rows) -> Rows:
    """[..., item] of [..., token, channel]: tiles of 16 tokens, and in each a pair of channels of
    all tokens before the next pair."""
    *outer, tokens, channels = rows.shape
    tiles = rows.reshape(*outer, tokens // 16, 16, channels // 2, 2)
    return np.ascontiguousarray(tiles.swapaxes(-3, -2)).reshape(*outer, -1)


def packed_values(rows: Rows) -> Rows:
    """The same of values: 16 channels of all tokens, and in these a pair of tokens of all channels
    before the next pair."""
    *outer, tokens, channels = rows.shape
    tiles = rows.reshape(*outer, tokens // 2, 2, channels // 16, 16)
    found = np.moveaxis(tiles, (-2, -4, -1, -3), (-4, -3, -2, -1))
    return np.ascontiguousarray(found).reshape(*outer, -1)


def by_column(rows: Rows) -> Rows:
    """[..., item] of [..., token, channel], as the vector kernels have keys."""
    return np.ascontiguousarray(rows.swapaxes(-1, -2)).reshape(*rows.shape[:-2], -1)


def by_row(rows: Rows) -> Rows:
    """[..., item] of [..., token, channel]."""
    return rows.reshape(*rows.shape[:-2], -1)
