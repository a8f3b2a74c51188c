"""The factors of the compatibility hash, which P and D must have alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import SEND_ONE, BadOptions
from kvpatch.peer import peer_hash as hashed
from kvpatch.tools.planning.arguments import ANSWERED, plain
from kvpatch.tools.planning.engine import Pair, PlannedEngine

#: Options of the weights, and of caches that descriptions have by themselves: no hash has them.
_OPTIONS = (
    *("revision", "code_revision", "quantization", "enable_lora", "lora_modules"),
    *ANSWERED,
)
_TYPES = "the cache's data type"
#: Factors that change the meaning of a block's bytes.
_CONTENT = ("num_hidden_layers", "num_kv_heads", "head_size", "dtype", _TYPES)
_NIXLS = "NIXL's backends"
_ONE_MODEL = "give both sides one model"
_HYBRID = "--disable-hybrid-kv-cache-manager"
_ACCEPT = f", or {settings.ACCEPT} on D (docs/how-to/rolling_upgrades.md)"
#: By the hash's name of a factor, or a plan's own: its label and cure.
_FACTORS: Mapping[str, tuple[str, str]] = {
    hashed.VERSION: ("vLLM's release", f"use one release on both sides{_ACCEPT}"),
    "model": ("--model", "give both sides one --model, word by word"),
    "num_hidden_layers": ("the layers", _ONE_MODEL),
    "num_kv_heads": ("the KV heads", _ONE_MODEL),
    "head_size": ("the heads' width", _ONE_MODEL),
    "dtype": ("the model's data type", "use one --dtype"),
    _TYPES: (_TYPES, "use one --kv-cache-dtype"),
    hashed.CACHE_DTYPE: ("--kv-cache-dtype", "use one --kv-cache-dtype, word by word"),
    hashed.BACKEND: ("the attention backend", f"use one --attention-backend{_ACCEPT}"),
    hashed.SPECULATION: ("--speculative-config", "use one --speculative-config on both sides"),
    hashed.CROSS_LAYERS: ("enable_cross_layers_blocks", "use one enable_cross_layers_blocks"),
    hashed.MODE: ("transfer_mode", "use one kv_connector on both sides"),
    hashed.HYBRID: (_HYBRID, f"give {_HYBRID} to both sides or to none"),
    _NIXLS: (_NIXLS, "give both sides the same `backends` in kv_connector_extra_config"),
    **{name: (f"--{plain(name)}", f"use one --{plain(name)} on both sides") for name in _OPTIONS},
}
_DRAFT = ("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype")
#: The data types of recurrent states, which no hash has.
_OF_STATES = (
    ("the type of a convolution's states", "use one --mamba-cache-dtype"),
    ("the type of recurrent states", "use one --mamba-ssm-cache-dtype"),
)


@dataclass(frozen=True)
class Factor:
    """A factor that P and D have unlike."""

    name: str
    theirs: object
    ours: object
    label: str
    cure: str

    def __str__(self) -> str:
        return f"P and D differ in {self.label}: {self.theirs} and {self.ours}"


def _values(engine: PlannedEngine) -> dict[str, Any]:
    """An engine's factors by its arguments."""
    caches, drafts = engine.caches, engine.drafts
    is_push = engine.transfer.get("kv_connector") == "NixlPushConnector"
    crosses = str(engine.extra_config.get("enable_cross_layers_blocks", False)).strip().lower()
    return {
        hashed.VERSION: engine.facts.release,
        "model": engine.model,
        "num_hidden_layers": len(caches.layers),
        "num_kv_heads": caches.kv_heads,
        "head_size": caches.first.head_dim,
        "dtype": caches.model_dtype,
        _TYPES: caches.cache_dtype,
        hashed.CACHE_DTYPE: engine.arguments.option("kv_cache_dtype", "auto"),
        hashed.BACKEND: engine.backend.name,
        hashed.SPECULATION: {name: drafts[name] for name in _DRAFT if drafts.get(name)} or "none",
        hashed.CROSS_LAYERS: crosses in ("true", "1"),
        hashed.MODE: "push" if is_push else "pull",
        hashed.HYBRID: bool(engine.arguments.option("disable_hybrid_kv_cache_manager")),
        _NIXLS: engine.extra_config.get("backends") or ["UCX"],
        **{name: engine.arguments.option(name) or None for name in _OPTIONS},
    }


def unlike_factors(pair: Pair) -> list[Factor]:
    """The factors that differ; of two descriptions, as vLLM's own hash has them."""
    theirs, ours = map(_values, pair.sides)
    described = [side.arguments.described for side in pair.sides]
    if described[0] and described[1]:
        of_both = [{**(one.factors or {}), hashed.VERSION: one.version} for one in described if one]
        for name in of_both[0].keys() & of_both[1].keys() & _FACTORS.keys():
            theirs[name], ours[name] = (one[name] for one in of_both)
    found = [
        Factor(name, theirs[name], ours[name], *_FACTORS[name])
        for name in _FACTORS
        if theirs[name] != ours[name]
    ]
    release = pair.decode.facts.release
    names = pair.decode.facts.hash_factors if is_hashed(pair) else frozenset()
    for one in found:
        if one.name not in (*names, *_CONTENT):
            raise BadOptions(
                f"not planned for: {one}, which vLLM {release} does not compare", one.cure
            )
    for name, value in ((hashed.CROSS_LAYERS, True), (hashed.MODE, "push")):
        if theirs[name] == ours[name] == value:
            raise BadOptions(f"not planned for: {_FACTORS[name][0]} {value}", SEND_ONE)
    return found


def uncompared(pair: Pair, found: list[Factor]) -> list[Factor]:
    """The factors that vLLM does not compare, though they change the meaning of bytes."""
    unseen = [one for one in found if one.name in _CONTENT and not is_hashed(pair)]
    states = [next(iter(side.caches.states.values()), None) for side in pair.sides]
    if states[0] and states[1]:
        for place, (label, cure) in zip((0, -1), _OF_STATES, strict=True):
            theirs, ours = (one.dtypes[place] for one in states if one)
            if theirs != ours:
                unseen.append(Factor("", theirs, ours, label, cure))
    return unseen


def is_hashed(pair: Pair) -> bool:
    """True if D compares hashes."""
    return pair.decode.extra_config.get("enforce_handshake_compat") is not False
