"""Recurrent states of the models that the lab plays, and what of them each rank has.

A rank's states are cut out of the whole model's by numpy, as the model's layers cut their weights:
that is what a read between unlike ranks is held against, and no code of kvpatch's takes part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .compare import Array, Fault

#: Of a convolution: one less than its kernel.
_POSITIONS = 3


@dataclass(frozen=True)
class States:
    """One layer's convolution and the state behind it.

    Attributes:
        mamba_type: as vLLM's enumeration of backends calls it.
        parts: channels of its convolution in the whole model, one part behind the other.
        heads: (or channels) of the other state, in the whole model; 0 where there is none.
        inner: the shape of one of these.
        groups: that the model's configuration states; None for none.
        is_whole: whether every rank has all channels.
    """

    mamba_type: str
    parts: tuple[int, ...]
    heads: int = 0
    inner: tuple[int, ...] = ()
    groups: int | None = None
    is_whole: bool = False

    def shapes(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Of a rank's states."""
        channels = sum(part.size for part in self.channels(0, ranks))
        convolution = (channels, _POSITIONS)
        if not self.heads:
            return (convolution,)
        return convolution, (self.heads // ranks, *self.inner)

    def channels(self, rank: int, ranks: int) -> list[Array]:
        """A rank's channels of each part of its convolution, by their numbers in the model's.

        Of one group for all heads every rank has all.
        """
        ends = np.cumsum(self.parts)
        parts = [np.arange(end - size, end) for size, end in zip(self.parts, ends, strict=True)]
        if self.is_whole:
            return parts
        shares = [np.split(part, ranks)[rank] for part in parts]
        return [shares[0], *parts[1:]] if self.groups == 1 else shares

    def elements(self, rank: int, ranks: int) -> tuple[Array, ...]:
        """A rank's elements of each state, by their numbers in the model's."""
        channels = np.concatenate(self.channels(rank, ranks))
        convolution = _unfolded(channels, _POSITIONS)
        if not self.heads:
            return (convolution,)
        heads = np.split(np.arange(self.heads), ranks)[rank]
        return convolution, _unfolded(heads, math.prod(self.inner))

    def sizes(self) -> tuple[int, int]:
        """Elements of the whole model's states."""
        return sum(self.parts) * _POSITIONS, self.heads * math.prod(self.inner)

    def faults(self, arrays: list[Array], blocks: list[int]) -> Iterator[Fault]:
        """What puts wrong things into D's convolutions.

        Args:
            arrays: of each rank, with the elements of a block in the last axis.
        """
        ranks = len(arrays)
        first, *others = (part.size * _POSITIONS for part in self.channels(0, ranks))

        def leave_out_second() -> None:
            for array in arrays:
                array[blocks, ..., first : first + others[0]] ^= array.dtype.type(3)

        def exchange() -> None:
            shares = [array[blocks] for array in arrays]
            if ranks == 1:  # P's two, where D has one
                shares[0][..., :first] = np.roll(shares[0][..., :first], first // 2, axis=-1)
            for array, share in zip(arrays, reversed(shares), strict=True):
                array[blocks] = share

        if others:
            yield "a state without its second part", leave_out_second
        if ranks == 1 or not self.is_whole:
            yield "ranks' states exchanged", exchange


def _unfolded(units: Any, items: int) -> Array:
    found: Array = (units[:, None].astype(np.int64) * items + np.arange(items)).reshape(-1)
    return found


MODELS = {
    # x of 4 heads of 8 channels; B and C of 4 groups of 4, or of one.
    "mamba2": States("MAMBA2", (32, 16, 16), 4, (8, 4), groups=4),
    "mamba2, one group": States("MAMBA2", (32, 4, 4), 4, (8, 4), groups=1),
    # q and k of 4 heads of 4 channels, v of 8 heads of 4.
    "gated delta net": States("GDN_ATTN", (16, 16, 32), 8, (4, 4)),
    # q, k and v of 4 heads of 4; the release gives it gated delta nets' backend and division.
    "kimi delta attention": States("GDN_ATTN", (16, 16, 16), 4, (4, 4)),
    "mamba1": States("MAMBA1", (32,), 32, (8,)),
}

#: Of layers among others of unlike kinds (layer_kinds.py), by their kind.
OF_KINDS = {
    "linear": MODELS["gated delta net"],
    "linear, one group": MODELS["mamba2, one group"],
    # Qwen4's short convolution of n-grams that it embeds (PLE).
    "ple": States("SHORT_CONV", (640,), is_whole=True),
}
