"""Whether a peer's cache holds what we have computed ourselves, where and in which layout.

Two engines that compute one prompt come to keys and values that are near, not equal:
kernels, ranks and batches differ. So layouts are told apart by distance: read by the wrong
one, a block shows other tokens' and heads' values, which are as far away as any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

#: The nearest has to be this much nearer than the next.
_TIMES_NEARER = 4.0
#: And the next this far away: zeros are near to zeros under every layout.
_LEAST_APART = 0.1
#: Pairs of a token and a head that lie elsewhere under another layout.
_LEAST_TELLING = 16
#: Channels that are looked at together.
_PART_CHANNELS = 64


def distance(ours: Values, theirs: Values) -> float:
    """From 0, the same, to 1: the mean of |a - b| / (|a| + |b|), whatever the items' size.

    About 0.7 for values that have nothing to do with one another, and some hundredths for
    the noise of other kernels. Of two that are not numbers nothing is known.
    """
    numbers = np.isfinite(ours), np.isfinite(theirs)
    known = numbers[0] | numbers[1]
    if not known.any():
        return 1.0
    is_pair = numbers[0] & numbers[1]
    a, b = ours[is_pair], theirs[is_pair]
    size = np.abs(a) + np.abs(b)
    apart = np.abs(a - b) / np.where(size > 0, size, 1.0)
    alone = int(known.sum()) - a.size  # a number beside none
    return float((apart.sum() + alone) / known.sum())


def clearly_nearest(distances: Mapping[str, float]) -> str | None:
    """The name of what is much nearer than all others; None where nothing is."""
    first, second, *_ = sorted(distances, key=distances.__getitem__)
    return first if is_much_nearer(distances[first], distances[second]) else None


def is_much_nearer(near: float, far: float) -> bool:
    """Whether what is far is far away, and what is near much nearer."""
    return far >= _LEAST_APART and near * _TIMES_NEARER <= far


def farthest_part(ours: Values, theirs: Values) -> float:
    """The :func:`distance` of those channels, so many side by side, that are farthest apart.

    The mean over all would hide a few that tell one place in a prompt from another: of 576
    of MLA's 64 are turned by the position.

    Args:
        ours, theirs: [token, head, channel].
    """
    channels = ours.shape[-1]
    return max(
        distance(ours[..., c : c + _PART_CHANNELS], theirs[..., c : c + _PART_CHANNELS])
        for c in range(0, channels, _PART_CHANNELS)
    )


def places_that_differ(places: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.bool_] | None:
    """Where [token, head] is elsewhere under each layout; None where too few are.

    Args:
        places: byte offsets of each (token, head), per layout.
    """
    first, *others = places
    telling = np.ones(first.shape, dtype=np.bool_)
    for other in others:
        telling &= first != other
    return telling if int(telling.sum()) >= _LEAST_TELLING else None


def values_of(raw: npt.NDArray[np.uint8], dtype: Any) -> Values:
    """Items as numbers.

    Args:
        raw: [..., byte of an item].
        dtype: torch's, of the cache; bytes are taken for fp8.
    """
    import torch

    if dtype in (torch.uint8, torch.int8):
        dtype = torch.float8_e4m3fn
    items = torch.from_numpy(np.ascontiguousarray(raw)).view(dtype)
    found: Values = items.to(torch.float64).squeeze(-1).numpy()
    return found
