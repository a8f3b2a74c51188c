"""The factors that P and D must have alike before a handshake compares blocks.

From 0.13 on a worker states a hash of them and refuses another one; before, it asserts that the
attention backends have one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvpatch.core import settings
from kvpatch.core.errors import SEND_ONE, BadOptions, CannotPlan, PeerRefused
from kvpatch.peer import peer_hash as hashed
from kvpatch.peer.peer_hash import Explanation, not_accepted
from kvpatch.tools.planning.engine import PlannedEngine
from kvpatch.tools.planning.pair import Pair

#: "content" changes the meaning of a block's bytes; "name" is compared by every release; "word" is
#: the spelling of an option, which only the hash has; "since": only some releases' hashes have it.
Kind = Literal["content", "name", "word", "since"]

_TYPES = "the cache's data type"
_ONE_MODEL = "give both sides one model"
#: By the hash's name of a factor, or a plan's own: its label, cure and kind.
_FACTORS: Mapping[str, tuple[str, str, Kind]] = {
    hashed.VERSION: ("vLLM's release", "use one release on both sides", "name"),
    "model": ("--model", "give both sides one --model, word by word", "word"),
    "num_hidden_layers": ("the layers", _ONE_MODEL, "content"),
    "num_kv_heads": ("the KV heads", _ONE_MODEL, "content"),
    "head_size": ("the heads' width", _ONE_MODEL, "content"),
    "dtype": ("the model's data type", "use one --dtype", "content"),
    _TYPES: (_TYPES, "use one --kv-cache-dtype", "content"),
    hashed.CACHE_DTYPE: (
        "--kv-cache-dtype", "give both sides one --kv-cache-dtype, word by word", "word",
    ),
    hashed.BACKEND: (
        "the attention backend",
        "use one attention backend (VLLM_ATTENTION_BACKEND or --attention-backend)", "name",
    ),
    hashed.SPECULATION: (
        "--speculative-config", "give both sides one --speculative-config", "since",
    ),
    hashed.CROSS_LAYERS: (
        "enable_cross_layers_blocks",
        "give both sides one enable_cross_layers_blocks in kv_connector_extra_config", "since",
    ),
    hashed.MODE: ("transfer_mode", "use one kv_connector on both sides", "since"),
    hashed.HYBRID: (
        "--disable-hybrid-kv-cache-manager", "give it to both sides, or to none", "since",
    ),
}  # fmt: skip
_DRAFT = ("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype")


@dataclass(frozen=True)
class Factor:
    """A factor that P and D have unlike."""

    name: str
    theirs: str
    ours: str
    label: str
    cure: str
    kind: Kind

    def __str__(self) -> str:
        return f"P and D differ in {self.label}: {self.theirs} and {self.ours}"


def _values(engine: PlannedEngine) -> dict[str, Any]:
    """An engine's factors by its arguments."""
    caches, drafts = engine.caches, engine.drafts
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
        hashed.MODE: "push" if engine.is_push else "pull",
        hashed.HYBRID: bool(engine.arguments.option("disable_hybrid_kv_cache_manager")),
    }


def unlike_factors(pair: Pair) -> list[Factor]:
    """The factors that differ; of two descriptions, as vLLM's own hash has them.

    Raises:
        CannotPlan: one of them is not in the hash of D's release.
    """
    theirs, ours = map(_values, pair.sides)
    described = [side.arguments.described for side in pair.sides]
    if described[0] and described[1]:
        theirs[hashed.VERSION], ours[hashed.VERSION] = (one.version for one in described if one)
        factors = [one.factors or {} for one in described if one]
        for name in factors[0].keys() & factors[1].keys() & _FACTORS.keys():
            theirs[name], ours[name] = (one[name] for one in factors)
    found = [
        Factor(name, str(theirs[name]), str(ours[name]), *_FACTORS[name])
        for name in _FACTORS
        if theirs[name] != ours[name]
    ]
    names = pair.decode.facts.hash_factors if is_hashed(pair) else frozenset()
    for one in found:
        if one.kind == "since" and one.name not in names:
            raise CannotPlan(
                f"not planned for: {one}, which vLLM {pair.decode.facts.release} does not compare",
                one.cure,
            )
    for name, value in ((hashed.CROSS_LAYERS, True), (hashed.MODE, "push")):
        if theirs[name] == ours[name] == value:
            raise CannotPlan(f"not planned for: {_FACTORS[name][0]} {value}", SEND_ONE)
    return found


def compared(pair: Pair, found: list[Factor]) -> list[Factor]:
    """The factors for which vLLM's handshake refuses."""
    if is_hashed(pair):
        return found
    is_asserted = not pair.decode.facts.encodes_metadata
    return [one for one in found if is_asserted and one.kind == "name"]


def uncompared(pair: Pair, found: list[Factor]) -> list[Factor]:
    """The factors that vLLM does not compare, though they change the meaning of bytes."""
    unseen = [one for one in found if one.kind == "content" and not is_hashed(pair)]
    labels = (
        ("the type of a convolution's states", "--mamba-cache-dtype"),
        ("the type of recurrent states", "--mamba-ssm-cache-dtype"),
    )
    states = [[one.dtypes for one in side.caches.states.values()] for side in pair.sides]
    if all(states) and states[0][0] != states[1][0]:
        for place, (label, option) in zip((0, -1), labels, strict=True):
            theirs, ours = (one[0][place] for one in states)
            if theirs != ours:
                unseen.append(Factor("", theirs, ours, label, f"use one {option}", "content"))
    return unseen


def is_hashed(pair: Pair) -> bool:
    """True if D compares hashes."""
    enforces = pair.decode.extra_config.get("enforce_handshake_compat") is not False
    return pair.decode.facts.encodes_metadata and enforces


def accepted_difference(pair: Pair, found: list[Factor]) -> Explanation | None:
    """The difference of hashes that D's kvpatch accepts; None where nothing differs.

    Raises:
        PeerRefused: D does not accept it, or it changes the meaning of bytes.
        BadOptions: ``KVPATCH_ACCEPT`` names what cannot be accepted.
    """
    p, d = pair.sides
    found = compared(pair, found)
    if not found:
        return None
    first = next((one for one in found if one.kind != "name"), found[0])
    if first.kind != "name" or not d.facts.states_hash:
        raise PeerRefused(str(first), first.cure)
    of = {one.name: one for one in found}
    version = of.get(hashed.VERSION)
    theirs, ours = (version.theirs, version.ours) if version else (d.facts.release,) * 2
    dtype = str(p.arguments.option("kv_cache_dtype", "auto"))
    backends = p.backend.name, d.backend.name
    named = Explanation(theirs, p.facts.release, backends[0], ours, backends[1], dtype)
    accepted = settings.listed(d.arguments.environment.get(settings.ACCEPT, ""))
    for name in accepted:
        if name not in settings.ACCEPTABLE:
            raise BadOptions(
                f"{settings.ACCEPT}={name!r} can not be accepted; {', '.join(settings.ACCEPTABLE)} "
                "can be",
                "leave it out",
            )
    if not set(named.factors) <= set(accepted):
        raise not_accepted(named, accepted)
    return named
