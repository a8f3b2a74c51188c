"""A description of an engine: what ``kvpatch describe`` or ``kvpatch doctor`` writes, plan reads.

It is one JSON object. What vLLM was asked for has the form of an engine's arguments; `caches` and
`hash` are what vLLM answered, and null where nobody has asked it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpatch.core.errors import SEND_ONE, BadOptions, CannotPlan
from kvpatch.geometry.state_shares import Part, SharedState
from kvpatch.tools.planning.model import Model
from kvpatch.worker.state_division import StateDivision

#: The entry that holds the schema's number, by which a description is told from arguments.
SCHEMA = "kvpatch_description"
NUMBER = 1

#: KVCacheSpec classes by what a block of theirs holds; caches of others are not planned for.
_ROWS = ("FullAttentionSpec", "SlidingWindowSpec")
_LATENT = "MLAAttentionSpec"
_STATE = "MambaSpec"


@dataclass(frozen=True)
class Layer:
    """The cache of one layer on the described rank.

    Attributes:
        kind: the class of its KVCacheSpec.
        page_bytes: of one block, with padding.
        value_dim: the width of values, where it is not that of keys.
        window: in tokens; 0 for full attention.
        shapes: of recurrent states on this rank.
        parts: by recurrent state, the bytes of a unit, and the units of each part that all ranks
            have together, with whether each rank has a copy.
        undivided: why nobody can say the parts; empty where they are said.
    """

    name: str
    kind: str
    backend: str
    block_tokens: int
    page_bytes: int
    dtypes: tuple[str, ...]
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    parts: tuple[tuple[int, tuple[tuple[int, bool], ...]], ...] = ()
    undivided: str = ""

    @property
    def division(self) -> StateDivision:
        """The way in which all ranks share out its states."""
        states = (
            SharedState(unit_bytes, tuple(Part(units, copied) for units, copied in parts))
            for unit_bytes, parts in self.parts
        )
        return StateDivision(tuple(states), self.undivided)


@dataclass(frozen=True)
class Caches:
    """The caches of one rank, as vLLM plans them.

    Attributes:
        rank: of tensor parallel ranks.
        kernel_tokens: of the blocks that kernels take.
        heads, kv_heads: of the whole model.
        cache_dtype: of a token's keys and values.
        groups: the names of the layers of each block table.
    """

    rank: int
    block_tokens: int
    kernel_tokens: int
    layout: str
    heads: int
    kv_heads: int
    model_dtype: str
    cache_dtype: str
    layers: tuple[Layer, ...]
    groups: tuple[tuple[str, ...], ...]

    def of_kind(self, *kinds: str) -> tuple[Layer, ...]:
        """The layers whose spec is one of these."""
        return tuple(layer for layer in self.layers if layer.kind in kinds)

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends of attention."""
        return tuple(dict.fromkeys(one.backend for one in self.layers if one.kind != _STATE))

    @property
    def division(self) -> StateDivision | None:
        """The way in which all ranks share out the states of a layer; None where there are none."""
        return next((layer.division for layer in self.of_kind(_STATE)), None)

    @property
    def state_dtypes(self) -> tuple[str, str]:
        """The types of a convolution's states, and of the recurrent ones behind them."""
        first = next(iter(self.of_kind(_STATE)), None)
        dtypes = (self.model_dtype,) * 2 if first is None else first.dtypes
        return dtypes[0], dtypes[-1]

    @property
    def numbered_groups(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the layers of each block table."""
        numbers = {layer.name: number for number, layer in enumerate(self.layers)}
        return tuple(tuple(numbers[name] for name in group) for group in self.groups)

    def model(self, name: str, source: str) -> Model:
        """The model that these are the caches of.

        Raises:
            CannotPlan: it has caches that are not planned for.
        """
        strange = {one.kind for one in self.layers} - {*_ROWS, _LATENT, _STATE}
        attention = self.of_kind(*_ROWS, _LATENT)
        if strange or not attention:
            raise CannotPlan(
                f"{source}: not planned for: layers of {', '.join(sorted(strange)) or 'states'} "
                "alone",
                SEND_ONE,
            )
        shapes = {
            (one.kind == _LATENT, one.kv_heads, one.head_dim, one.value_dim, one.dtypes)
            for one in attention
        }
        divisions = {one.division for one in self.of_kind(_STATE)}
        if len(shapes) > 1 or len(divisions) > 1 or attention[0].value_dim not in (
            0, attention[0].head_dim,
        ):  # fmt: skip
            raise CannotPlan(
                f"{source}: not planned for: layers whose caches have several shapes "
                "(docs/reference/limits.md says what is read of them)",
                SEND_ONE,
            )
        undivided = next((one.undivided for one in self.of_kind(_STATE) if one.undivided), None)
        if undivided is not None:
            raise CannotPlan(f"{source}: not planned for: recurrent states: {undivided}", SEND_ONE)
        if len({one.block_tokens for one in self.layers}) > 1 or len(self.backends) > 1:
            raise CannotPlan(
                f"{source}: not planned for: layers with blocks of several sizes, or of several "
                f"attention backends ({', '.join(self.backends)})",
                SEND_ONE,
            )
        return Model(
            name=name,
            layers=len(self.layers),
            kv_heads=self.kv_heads,
            heads=self.heads,
            head_dim=attention[0].head_dim,
            dtype=self.model_dtype,
            is_mla=attention[0].kind == _LATENT,
            windows=tuple(one.window for one in attention),
            state_layers=tuple(n for n, one in enumerate(self.layers) if one.kind == _STATE),
        )


@dataclass(frozen=True)
class Description:
    """The answers of vLLM on one engine.

    Attributes:
        version: vLLM's, as it hashes it.
        caches: None where nobody knows them.
        factors: of the compatibility hash, by the release's names; empty where nobody knows them.
    """

    version: str
    caches: Caches | None = None
    factors: Mapping[str, Any] | None = None


def read_json(path: Path) -> Mapping[str, Any] | None:
    """The object of a file that holds a description; None of any other file.

    Raises:
        BadOptions: it is of another schema.
    """
    if path.suffix != ".json":
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return None  # whoever reads it as arguments says what is wrong
    if not isinstance(content, Mapping) or SCHEMA not in content:
        return None
    if content[SCHEMA] != NUMBER:
        raise BadOptions(
            f"{path} is a description of schema {content[SCHEMA]!r}, and this kvpatch reads "
            f"{NUMBER}",
            "write it anew with this kvpatch",
        )
    return content


def description_in(content: Mapping[str, Any], path: Path) -> Description:
    """Reads what a description says that arguments do not.

    Raises:
        BadOptions: something is missing in it, or is none of what it should be.
    """
    try:
        caches, hashed = content["caches"], content["hash"]
        return Description(
            str(content["vllm"]),
            None if caches is None else _caches(caches),
            None if hashed is None else dict(hashed["factors"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadOptions(
            f"{path} is no whole description ({error!r:.100})", "write it anew, and leave it as is"
        ) from None


def _caches(found: Mapping[str, Any]) -> Caches:
    layers = tuple(
        Layer(
            **{
                **one,
                "dtypes": tuple(one["dtypes"]),
                "shapes": tuple(map(tuple, one["shapes"])),
                "parts": tuple((size, tuple(map(tuple, of))) for size, of in one["parts"]),
            }
        )
        for one in found["layers"]
    )
    groups = tuple(map(tuple, found["groups"]))
    read = Caches(**{**found, "layers": layers, "groups": groups})
    read.numbered_groups  # noqa: B018  KeyError of a layer that is not there
    return read
