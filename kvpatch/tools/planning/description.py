"""The caches of one engine: as vLLM has described them, or as a config.json says them.

A description is one JSON object that ``kvpatch describe`` writes and ``kvpatch plan`` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpatch.core.errors import SEND_ONE, BadOptions, CannotPlan
from kvpatch.geometry.state_shares import Part, SharedState
from kvpatch.worker.state_division import StateDivision

#: The entry that holds the schema's number, by which a description is told from arguments.
SCHEMA = "kvpatch_description"
NUMBER = 1

#: KVCacheSpec classes by what a block of theirs holds; caches of others are not planned for.
FULL, WINDOW = "FullAttentionSpec", "SlidingWindowSpec"
LATENT, STATE = "MLAAttentionSpec", "MambaSpec"
#: Bytes of one number, by the types that are not cut to a byte.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Layer:
    """The cache of one layer on the first rank.

    Attributes:
        kind: the class of its KVCacheSpec.
        page_bytes: of one block, with padding; 0 where vLLM was not asked.
        value_dim: the width of values; 0 where there are none apart.
        window: in tokens; 0 for full attention.
        shapes: of recurrent states.
        parts: by recurrent state, the bytes of a unit, and the units of each part that all ranks
            have together, with True for a part that each rank has whole.
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

    @property
    def division(self) -> StateDivision:
        """The way in which all ranks share out its states."""
        parts = ((size, tuple(Part(*one) for one in of_all)) for size, of_all in self.parts)
        return StateDivision(tuple(SharedState(*one) for one in parts), reason="")


@dataclass(frozen=True)
class Caches:
    """The caches of the first rank.

    Attributes:
        kernel_tokens: of the blocks that kernels take; 0 where the attention backend decides.
        heads, kv_heads: of the whole model.
        cache_dtype: of a token's keys and values.
        groups: the names of the layers of each block table.
    """

    block_tokens: int
    kernel_tokens: int
    layout: str
    heads: int
    kv_heads: int
    model_dtype: str
    cache_dtype: str
    layers: tuple[Layer, ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def attention(self) -> dict[int, Layer]:
        """The layers whose blocks hold tokens, by their numbers."""
        return {n: one for n, one in enumerate(self.layers) if one.kind != STATE}

    @property
    def states(self) -> dict[int, Layer]:
        """The layers with recurrent states, by their numbers."""
        return {n: one for n, one in enumerate(self.layers) if one.kind == STATE}

    @property
    def first(self) -> Layer:
        """The first layer whose blocks hold tokens: all of them have caches of one shape."""
        return next(iter(self.attention.values()))

    @property
    def is_mla(self) -> bool:
        """True if blocks hold latents."""
        return self.first.kind == LATENT

    @property
    def has_groups(self) -> bool:
        """True if layers have several block tables, or one with a window."""
        return bool(self.states) or any(one.window for one in self.attention.values())

    @property
    def numbered_groups(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the layers of each block table."""
        numbers = {layer.name: number for number, layer in enumerate(self.layers)}
        return tuple(tuple(numbers[name] for name in group) for group in self.groups)

    def check(self, source: str) -> None:
        """Raises :class:`CannotPlan` for caches that a plan does not know."""
        kinds = {one.kind for one in self.layers}
        shapes = {
            (one.kind == LATENT, one.kv_heads, one.head_dim, one.value_dim, one.dtypes)
            for one in self.attention.values()
        }
        blocks = {one.block_tokens for one in self.layers}
        backends = {one.backend for one in self.attention.values()}
        states = {one.parts for one in self.states.values()}
        found = ""
        if kinds - {FULL, WINDOW, LATENT, STATE} or not shapes:
            found = f"caches of {', '.join(sorted(kinds))}"
        elif len(shapes) > 1 or self.first.value_dim not in (0, self.first.head_dim):
            found = "layers whose caches have several shapes"
        elif len(blocks) > 1 or len(backends) > 1:
            found = "layers with blocks of several sizes, or with several attention backends"
        elif len(states) > 1 or () in states:
            found = "these recurrent states"
        if found:
            raise CannotPlan(f"{source}: not planned for: {found}", SEND_ONE)


@dataclass(frozen=True)
class Description:
    """The answers of vLLM on one engine: its version and factors are those that it hashes."""

    version: str
    caches: Caches
    factors: Mapping[str, Any] | None = None


def read_json(path: Path) -> Mapping[str, Any] | None:
    """Returns the object of a file that holds a description; None of any other file."""
    try:
        content = json.loads(path.read_text("utf-8")) if path.suffix == ".json" else None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return None  # the reader of arguments says what is wrong
    if not isinstance(content, Mapping) or SCHEMA not in content:
        return None
    if content[SCHEMA] != NUMBER:
        reason = f"{path} is a description of schema {content[SCHEMA]!r}, and not of {NUMBER}"
        raise BadOptions(reason, "write it anew with this kvpatch")
    return content


def description_in(content: Mapping[str, Any], path: Path) -> Description:
    """Reads the caches and the factors of a description."""
    try:
        found, hashed = _as_tuples(content["caches"]), content["hash"]
        layers = tuple(Layer(**one) for one in found["layers"])
        caches = Caches(**{**found, "layers": layers})
        factors = None if hashed is None else dict(hashed["factors"])
        caches.numbered_groups  # noqa: B018  KeyError of a layer that is not there
        caches.check(str(path))
        return Description(str(content["vllm"]), caches, factors)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{path} is no whole description ({error!r:.100})"
        raise BadOptions(reason, "write it anew, and leave it as is") from None


def _as_tuples(found: Any) -> Any:
    """Turns the lists of JSON into tuples."""
    if isinstance(found, dict):
        return {name: _as_tuples(one) for name, one in found.items()}
    return tuple(map(_as_tuples, found)) if isinstance(found, list) else found
