"""What can go wrong with a load: faults of what a cache holds of a request's tokens.

Each leaves the slot of the prompt's last token as it is, which D computes again, but for those that
are of a whole load. Torch, no vLLM.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Layer = Mapping[str, "torch.Tensor"]
"""By content (key, value) what one layer holds: [token, head, channel], contiguous."""


@dataclass(frozen=True)
class Load:
    """What a cache holds of a request, layer by layer, and of another prompt at the same places.

    Attributes:
        other: of no fewer tokens.
        block_tokens: of the engine that holds it; two blocks lie in front of the last token.
        chance: draws places.
    """

    layers: Sequence[Layer]
    other: Sequence[Layer]
    block_tokens: int
    chance: random.Random

    @property
    def last(self) -> int:
        """The place of the prompt's last token."""
        return len(next(iter(self.layers[0].values()))) - 1

    @property
    def middle(self) -> int:
        """The layer in the middle."""
        return len(self.layers) // 2

    @property
    def whole_blocks(self) -> int:
        """Those in front of the last token's."""
        return self.last // self.block_tokens

    def block(self, number: int) -> slice:
        """The tokens of a block."""
        return slice(number * self.block_tokens, (number + 1) * self.block_tokens)

    def rows(self) -> Iterable[torch.Tensor]:
        """Of all layers and contents."""
        return (rows for layer in self.layers for rows in layer.values())


def _stale(load: Load, tokens: slice, layers: Sequence[int] | None = None) -> None:
    """These tokens are the other prompt's."""
    for number in range(len(load.layers)) if layers is None else layers:
        for content, rows in load.layers[number].items():
            rows[tokens] = load.other[number][content][tokens]


def _whole_context(load: Load) -> None:
    _stale(load, slice(0, load.last))


def _whole_load(load: Load) -> None:
    _stale(load, slice(0, load.last + 1))


def _stale_block(share: float, load: Load) -> None:
    _stale(load, load.block(min(int(share * load.whole_blocks), load.whole_blocks - 1)))


def _zeroed_block(load: Load) -> None:
    for rows in load.layers[load.middle].values():
        rows[load.block(load.whole_blocks // 2)] = 0


def _swapped_blocks(load: Load) -> None:
    first, second = load.chance.sample(range(load.whole_blocks), 2)
    for rows in load.rows():
        kept = rows[load.block(first)].clone()
        rows[load.block(first)] = rows[load.block(second)]
        rows[load.block(second)] = kept


def _swapped_heads(load: Load) -> None:
    for rows in load.layers[load.middle].values():
        rows[: load.last] = rows[: load.last].flip(1)


def _doubled_values(load: Load) -> None:
    load.layers[load.middle]["value"][: load.last] *= 2


def _scaled(load: Load) -> None:
    for rows in load.rows():
        rows[: load.last] *= 1.125


def _last_layer(load: Load) -> None:
    _stale(load, slice(0, load.last), [len(load.layers) - 1])


def _another_layer(load: Load) -> None:
    into, of = load.layers[load.middle], load.layers[load.middle - 1]
    for content, rows in into.items():
        rows[: load.last] = of[content][: load.last]


def _lost_token(load: Load) -> None:
    half = load.last // 2
    for rows in load.rows():
        rows[half] = rows[half - 1]


def _flipped_key(layer: int | None, load: Load) -> None:
    load.layers[load.middle if layer is None else layer]["key"][load.last // 2] *= -1


def _wrong_byte(load: Load) -> None:
    import torch

    layer = load.chance.choice(load.layers)
    rows = layer[load.chance.choice(sorted(layer))]
    row = rows[load.chance.randrange(load.last)].view(torch.uint8).view(-1)
    row[load.chance.randrange(row.numel())] ^= load.chance.randrange(1, 256)


FAULTS: Mapping[str, Callable[[Load], None]] = {
    "whole context stale": _whole_context,
    "stale block, early": partial(_stale_block, 0.15),
    "stale block, middle": partial(_stale_block, 0.5),
    "stale block, late": partial(_stale_block, 0.85),
    "middle block zeroed in a middle layer": _zeroed_block,
    "heads swapped in a middle layer": _swapped_heads,
    "values doubled in a middle layer": _doubled_values,
    "all numbers times 1.125": _scaled,
    "last layer stale": _last_layer,
    "a layer from the one before it": _another_layer,
    "one token lost and one doubled": _lost_token,
    "one key flipped, first layer": partial(_flipped_key, 0),
    "one key flipped, middle layer": partial(_flipped_key, None),
    "one wrong byte": _wrong_byte,
    "two blocks swapped": _swapped_blocks,
    "another prompt's load, last token too": _whole_load,
}
"""Every fault by its name, in the order in which they are shown."""
