"""What a cache holds by rule, and how far a real one is from it.

Contents are a function of (content, plane, request, token, head, channel), so
that P and D can each compute them and no second copy has to travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
#: An array, the blocks and offsets of elements in it, and what is to be there.
Element = tuple[Array, Array, Array, Array]
#: A way to spoil a cache, and what does it.
Fault = tuple[str, Callable[[], None]]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_MIX = tuple(
    np.uint64(n)
    for n in (
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xFF51AFD7ED558CCD,
        0xC4CEB9FE1A85EC53,
    )
)


def expected(
    content: int,
    plane: int,
    request: npt.NDArray[np.int64],
    tokens: range,
    heads: range,
    channels: int,
    item_bytes: int,
) -> Array:
    """The raw elements of `tokens`, as an array [token, head, channel].

    Args:
        request: the number of the prompt that each of the tokens belongs to.
    """
    with np.errstate(over="ignore"):
        key = (
            np.uint64(content + 1) * _MIX[0]
            ^ np.uint64(plane + 1) * _MIX[1]
            ^ (np.asarray(request, dtype=np.uint64) + np.uint64(1)) * _MIX[2]
        )[:, None, None]
        token = np.asarray(tokens, dtype=np.uint64)[:, None, None] * _MIX[3]
        head = np.asarray(heads, dtype=np.uint64)[None, :, None] * _MIX[4]
        channel = np.arange(channels, dtype=np.uint64)[None, None, :] * _MIX[5]
        mixed = key + token + head + channel
        for shift in (30, 27, 31):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * _MIX[shift % 3]
        return (mixed >> np.uint64(32)).astype(UNSIGNED[item_bytes])


def numbers_of(item_bytes: int) -> np.generic:
    """The bits of an element that leave no NaN among floats: not the exponent's highest."""
    return UNSIGNED[item_bytes](~(1 << (8 * item_bytes - 2)) & ((1 << 8 * item_bytes) - 1))


def slots(block_ids: Sequence[int], tokens: range, block_tokens: int) -> tuple[Array, Array]:
    """The block and the offset in it of each of a request's `tokens`."""
    positions = np.asarray(tokens, dtype=np.int64)
    return np.asarray(block_ids, dtype=np.int64)[positions // block_tokens], (
        positions % block_tokens
    )


def compared(elements: Iterable[Element]) -> tuple[int, int]:
    """Wrong elements, and all."""
    wrong = total = 0
    for array, block, offset, value in elements:
        wrong += int(np.count_nonzero(array[block, offset] != value))
        total += value.size
    return wrong, total


def flip_last_bit(element: Element) -> None:
    """In the array itself."""
    array, block, offset, _ = element
    found = array[block, offset]
    found.reshape(-1)[-1] ^= 1
    array[block, offset] = found
