"""The meaning of each dimension of a cache tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvpatch.core.errors import UnreadableGeometry

_KINDS = {
    frozenset({"kv", "block", "token", "head", "channel"}): "keys and values side by side",
    frozenset({"block", "token", "head", "packed"}): "keys, then values, in the last dimension",
    frozenset({"block", "token", "packed_head", "channel"}): "heads K0 V0 K1 V1 ...",
    frozenset({"block", "token", "head", "channel"}): "one vector per token and head",
    frozenset({"block", "token", "channel"}): "one vector per token (MLA)",
    frozenset({"block", "slot", "token", "channel"}): "slots that each hold all heads",
    frozenset({"block", "state"}): "opaque state of a block (Mamba)",
}

#: Sizes that backends accept, in the order in which a backend takes them: blocks of a multiple of
#: 64 tokens, heads of a multiple of 128 channels.
_PROBE = {"blocks": 1024, "block_tokens": 192, "heads": 14, "channels": 256}
_STEP = {"blocks": 8, "block_tokens": 192, "heads": 2, "channels": 128}

_DEPENDENCE = {
    ("blocks", 1): "block",
    ("block_tokens", 1): "token",
    ("heads", 1): "head",
    ("heads", 2): "packed_head",
    ("channels", 1): "channel",
    ("channels", 2): "packed",
}


class KeyOrder(Enum):
    """The order of the keys of one block and head; values are [token, channel] but for tiles."""

    ROW_MAJOR = "[token, channel]"
    COLUMN_MAJOR = "[channel, token]"
    """The CPU backend's vector kernels. Where its tensor is packed, all keys of a block
    and head come first and all values after them, not token by token."""
    TILED = "[16 tokens, pair of channels, token, channel]"
    """The CPU backend's matrix kernels (AMX, items of 2 bytes), with all keys of a block and head
    before all values as well. Values are in tiles of their own: [16 channels, pair of tokens,
    channel, token]."""


@dataclass(frozen=True)
class DimensionOrder:
    """Names for a tensor's dimensions, in the order of its shape.

    The order of the shape, not of memory: strides say how memory lies. Names:

    ``block``, ``token``, ``head``, ``channel``
        as in a plane.
    ``kv``
        of size 2, keys at 0 and values at 1.
    ``packed``
        a token's key channels, then its value channels.
    ``packed_head``
        twice the heads, a key head and a value head by turns (TPU).
    ``slot``
        parts of a block that each hold all heads: keys, and values, in an order of their own.
    ``state``
        opaque elements of a block, in as many dimensions as the state has.

    Attributes:
        key_channels: of a packed dimension whose keys and values differ in width.
        value_channels: the same, where the width of the values is what is known.
    """

    dimensions: tuple[str, ...]
    key_channels: int | None = None
    value_channels: int | None = None

    def __post_init__(self) -> None:
        names = self.dimensions
        repeated = sorted({name for name in names if names.count(name) > 1 and name != "state"})
        if frozenset(names) not in _KINDS or repeated:
            known = "; ".join(
                f"{'/'.join(sorted(kind))}: {meaning}" for kind, meaning in _KINDS.items()
            )
            raise UnreadableGeometry(
                f"unknown dimension order {names}: expected one of these sets of dimensions, each "
                f"once, in any order ({known})"
            )
        if "packed" not in names and (self.key_channels or self.value_channels):
            raise UnreadableGeometry(
                f"dimension order {names}: expected key_channels and value_channels only beside a "
                f"packed dimension, found {self.key_channels} and {self.value_channels}"
            )

    @classmethod
    def probe(cls, shape_function: Callable[..., Any], **options: Any) -> DimensionOrder:
        """Finds the order that a backend uses by asking it for shapes.

        Each size is changed alone, and what changes with it in the shape is that size's
        dimension; a coefficient of two tells a packed one. Numbers that happen to be
        equal can therefore not be mixed up.

        Args:
            shape_function: takes (num_blocks, block_size, num_kv_heads, head_size), as a
                backend's ``get_kv_cache_shape``.
            options: passed to it by name (a cache dtype).

        Raises:
            UnreadableGeometry: a dimension mixes sizes, or depends on them in a way that
                no order here does.
        """

        def shape_of(sizes: dict[str, int]) -> tuple[int, ...]:
            return tuple(int(extent) for extent in shape_function(*sizes.values(), **options))

        sizes = dict(_PROBE)
        varied = set(_STEP)
        try:
            base = shape_of(sizes)
        except AssertionError:  # how MLA backends say that they have one head
            sizes["heads"] = 1
            varied.discard("heads")
            base = shape_of(sizes)
        changes: list[dict[str, int]] = [{} for _ in base]
        for size in sorted(varied):
            shape = shape_of({**sizes, size: sizes[size] + _STEP[size]})
            if len(shape) != len(base):
                raise UnreadableGeometry(
                    f"unknown dimension order: the shape {base} becomes {shape} with another {size}"
                )
            for found, before, after in zip(changes, base, shape, strict=True):
                if after != before:
                    found[size] = after - before
        names: list[str] = []
        value_channels: int | None = None
        for position, (extent, change) in enumerate(zip(base, changes, strict=True)):
            name = _name(extent, change, position == len(base) - 1, "heads" in varied)
            if name is None:
                raise UnreadableGeometry(
                    f"unknown dimension order: dimension {position} of shape {base} changes by "
                    f"{change} when {_STEP} are added one at a time to {sizes}"
                )
            names.append(name)
        if names and names[-1] == "channel" and "kv" not in names and "head" in names:
            fixed = base[-1] - sizes["channels"] if "channels" in changes[-1] else 0
            if fixed > 0:
                names[-1], value_channels = "packed", fixed
        if "packed_head" in names and names.index("packed_head") < names.index("token"):
            raise UnreadableGeometry(
                f"unknown dimension order {tuple(names)}: expected a doubled head dimension only "
                "behind the tokens, where keys and values alternate (TPU); NVFP4 caches are not "
                "supported, use another --kv-cache-dtype"
            )
        return cls(tuple(names), value_channels=value_channels)


def _name(extent: int, change: dict[str, int], is_last: bool, heads_varied: bool) -> str | None:
    """The name of a dimension by what it changes with; None if nothing here does so."""
    if not change:
        if is_last:
            return "channel"  # a fixed width: quantized MLA
        if extent == 2:
            return "kv"
        return "head" if extent == 1 and not heads_varied else None
    if len(change) > 1:
        return None
    ((size, difference),) = change.items()
    coefficient, rest = divmod(difference, _STEP[size])
    return None if rest else _DEPENDENCE.get((size, coefficient))
