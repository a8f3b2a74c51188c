"""The verdicts on a pair: of stock vLLM, and with kvpatch on D.

Both lean on the decision of the engine's own handshake (:func:`~kvpatch.peer.decision.decide`):
what kvpatch leaves to a release, the release reads exactly. Only what stock's handshake refuses is
added here, so that a refusal is told from wrong tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import SEND_ONE, BadOptions, PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.peer import peer_hash as hashed
from kvpatch.peer.decision import Decision, LocalCache, Read, Stock, decide
from kvpatch.peer.other_releases import speak_alike
from kvpatch.peer.statement import BY_WORD, DeclaredGeometry, word_of
from kvpatch.peer.unread_caches import why_joined_wrongly
from kvpatch.tools.planning.arguments import ANSWERED, nearest, plain, whole_number
from kvpatch.tools.planning.caches import geometry_of, stated_by
from kvpatch.tools.planning.engine import Pair, PlannedEngine

_OTHER_KEYS = "one processor has AMX, and the other one's keys of bfloat16 are in another order"
_STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
_SAME_BLOCKS = "use one --block-size on both sides"
_SAME_RANKS = "use one --tensor-parallel-size on both sides"
_SAME_LAYOUT = "use one VLLM_KV_CACHE_LAYOUT on both sides"
#: The fields of ``--kv-transfer-config``: of every release, and of those that take ``kv_rank``.
_TRANSFER = (
    *("kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port"),
    *("kv_connector_extra_config", "kv_connector_module_path", "enable_permute_local_kv"),
    "kv_load_failure_policy",
)
_RANKED = ("kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip")


class Outcome(Enum):
    """The outcome of requests that P computes and D takes over."""

    IDENTICAL = "identical"
    UNKNOWN = "not known"
    REFUSED = "refused at the first request"
    REFUSED_AT_START = "refused at start"
    WRONG = "wrong tokens, HTTP 200"


@dataclass(frozen=True)
class Verdict:
    """An outcome, the reason, what would help, and who reads: vLLM, kvpatch or neither."""

    outcome: Outcome
    reason: str = ""
    cure: str = ""
    way: str = "refused"


def verdicts(pair: Pair) -> tuple[Verdict, Verdict]:
    """The verdicts on stock engines, and on a D with kvpatch.

    Raises:
        BadOptions: the pair is not planned for, or a variable holds what kvpatch cannot take.
    """
    p, d = pair.sides
    for reason, cure in (found for side in pair.sides for found in start_problems(side)):
        problem = Verdict(Outcome.REFUSED_AT_START, reason, cure)
        return problem, problem
    factors = unlike_factors(pair)
    shares = max(p.tp_size, d.tp_size) > d.caches.kv_heads
    if d.caches.states and p.tp_size != d.tp_size and shares:
        raise BadOptions("not planned for: states over ranks that share KV heads", _SAME_RANKS)
    sure = DeclaredGeometry(keys=p.key_order if word_of(p.key_order) else None)
    exact = _decisions(pair, sure, None)
    stock, ours = _of_stock(pair, factors, exact), _of_kvpatch(pair, factors, exact)
    is_read = not all(isinstance(one, Stock) for one in exact)
    if (p.drafts or d.drafts) and is_read and ours.outcome is Outcome.IDENTICAL:
        what = "drafts with layers in a pair of unlike engines"
        raise BadOptions(f"not planned for: {what}", "make both engines alike, or leave drafts out")
    return stock, ours


def start_problems(engine: PlannedEngine) -> Iterator[tuple[str, str]]:
    """The reasons why an engine does not start with the connector, and the cures."""
    role, caches, heads, ranks = engine.role, engine.caches, engine.caches.kv_heads, engine.tp_size
    fields = (*_TRANSFER, *(_RANKED if engine.facts.takes_kv_rank else ()))
    unknown = sorted(engine.transfer.keys() - {*fields})
    if unknown:
        names = ", ".join(f"{name}{nearest(name, fields)}" for name in unknown)
        reason = f"{role}: --kv-transfer-config of vLLM {engine.facts.release} has no {names}"
        yield reason, f"take {', '.join(unknown)} out of {role}'s"
    if engine.transfer.get("kv_load_failure_policy", "fail") not in ("fail", "recompute"):
        yield f"{role}: kv_load_failure_policy is none of vLLM's", "write fail or recompute"
    if not isinstance(engine.lease, int | float):
        yield f"{role}: kv_lease_duration is {engine.lease!r}", "write a number of seconds"
    buffer = "cpu" if engine.device == "cpu" else "cuda"
    asked = engine.transfer.get("kv_buffer_device") or buffer
    if asked != buffer:
        cure = f'set "kv_buffer_device": "{buffer}" in its --kv-transfer-config'
        yield f"{role}: kv_buffer_device {asked} is not for {engine.device}", cure
    if engine.backend.device == "cpu" and engine.facts.names_layouts and engine.layout == "LBNHC":
        reason = f"{engine.backend.name} has one layout, and VLLM_KV_CACHE_LAYOUT asks for another"
        yield f"{role}: {reason}", "unset VLLM_KV_CACHE_LAYOUT"
    if caches.heads % ranks or (heads % ranks and ranks % heads):
        reason = f"{role}: {ranks} ranks cannot share {caches.heads} heads and {heads} KV heads"
        yield reason, "use a --tensor-parallel-size that divides them"
    if caches.states and engine.arguments.environment.get(_STATE_LAYOUT, "").upper() != "DS":
        reason = f"{role}: a model with recurrent states does not start with NixlConnector"
        yield reason, f"set {_STATE_LAYOUT}=DS"


# --- the decision of the handshake ----------------------------------------------------------


def _decisions(pair: Pair, declared: DeclaredGeometry, stated: KeyOrder | None) -> list[Decision]:
    """The decisions of D's first and last rank on each rank of P that they meet.

    Args:
        declared: the geometry of P that D takes for granted, where no handshake states it.
        stated: the order of P's keys that its kvpatch states.
    """
    p, d = pair.sides
    found = []
    for rank in sorted({0, d.tp_size - 1}):
        geometry = geometry_of(d, rank)
        planes = [plane for layer in geometry.layers.values() for plane in layer.planes]
        is_forced = d.arguments.environment.get(settings.TRANSFER, "").lower() == "staged"
        pool = _staging_bytes(d) if is_forced else None
        local = LocalCache(geometry, planes, pool, declared=declared)
        for met in pair.ranks_met(rank):
            peer = replace(stated_by(p, met, d), stated_keys=stated)
            found.append(decide(local, peer, d.facts))
    return found


def _staging_bytes(engine: PlannedEngine) -> int:
    found = engine.arguments.environment
    pool = found.get(settings.STAGING_BYTES, settings.DEFAULT_STAGING_BYTES)
    return whole_number(pool, settings.STAGING_BYTES)


def _declared(engine: PlannedEngine) -> DeclaredGeometry:
    """The geometry of P that D's variables declare."""
    found = engine.arguments.environment
    tokens, keys = found.get(settings.PEER_BLOCK_SIZE), found.get(settings.PEER_KEYS, "").lower()
    if keys and keys not in BY_WORD:
        raise BadOptions(f"{settings.PEER_KEYS} is {keys}", f"write {' or '.join(BY_WORD)}")
    layout = found.get(settings.PEER_LAYOUT, "").upper() or None
    number = whole_number(tokens, settings.PEER_BLOCK_SIZE) if tokens else None
    return DeclaredGeometry(number, layout, BY_WORD.get(keys))


def _of_kvpatch(pair: Pair, factors: list[Factor], exact: list[Decision]) -> Verdict:
    p, d = pair.sides
    unseen = next(iter(uncompared(pair, factors)), None)
    if unseen is not None and not unseen.name:
        # The bytes of states are compared, and their types only where P's kvpatch states them.
        of_both = [[one.parts for one in side.caches.states.values()] for side in pair.sides]
        says_types = p.has_kvpatch and speak_alike((p.facts.release,), d.facts)
        if of_both[0] == of_both[1] and not says_types:
            return _not_compared(unseen)
    for factor in (unseen, *(factors if is_hashed(pair) else ())):
        if factor is not None:
            return Verdict(Outcome.REFUSED, str(factor), factor.cure)
    states_keys = p.has_kvpatch and bool(word_of(p.key_order))
    declared = _declared(d)
    found = _decisions(pair, declared, p.key_order if states_keys else None)
    for one in found:
        if isinstance(one, PeerRefused):  # without the number of blocks, which no argument says
            reason = re.sub(r"\d+ blocks in (\d+ regions)", r"\1", one.reason)
            return Verdict(Outcome.REFUSED, reason, one.cure)
    if word_of(p.key_order) and declared.keys is not None and declared.keys is not p.key_order:
        said = f"{settings.PEER_KEYS} says {word_of(declared.keys)}, and P has another order"
        return Verdict(Outcome.WRONG, said, f"set {settings.PEER_KEYS}={word_of(p.key_order)} on D")
    if list(map(type, found)) != list(map(type, exact)):  # vLLM reads keys in another order
        return Verdict(Outcome.WRONG, _OTHER_KEYS, "set ENABLE_KVPATCH on P")
    is_read = any(isinstance(one, Read) for one in found)
    mib = _staging_bytes(d) / 2**20
    way = f"read by kvpatch; each worker of D takes up to {mib:g} MiB more memory"
    return Verdict(Outcome.IDENTICAL, way=way if is_read else "vLLM's own")


def _not_compared(factor: Factor) -> Verdict:
    return Verdict(Outcome.WRONG, f"{factor}, and nothing compares them", factor.cure)


# --- stock vLLM -------------------------------------------------------------------------------


def _of_stock(pair: Pair, factors: list[Factor], exact: list[Decision]) -> Verdict:
    p, d = pair.sides
    refusals = [(str(one), one.cure) for one in factors if is_hashed(pair)]
    for reason, cure in (*refusals, *_refusals(pair)):
        if d.facts.loses_failed_groups and d.caches.has_groups:
            lost = f"{reason}, and a refused load of several cache groups counts as received"
            return Verdict(Outcome.WRONG, lost, cure)
        return Verdict(Outcome.REFUSED, reason, cure)
    for unseen in uncompared(pair, factors):
        return _not_compared(unseen)
    if all(isinstance(one, Stock) for one in exact):
        return Verdict(Outcome.IDENTICAL, way="vLLM's own")
    if p.kernel_tokens < d.kernel_tokens:
        reason = f"P's blocks of {p.kernel_tokens} tokens become D's of {d.kernel_tokens}: vLLM "
        is_mla, heads = d.caches.is_mla, 0 if d.caches.is_mla else d.heads
        wrong = why_joined_wrongly(d.key_order, 1, d.layout, d.facts, heads=heads, is_mla=is_mla)
        if not wrong and not d.has_prefix_cache:
            reason += "does so rightly for some prompts only"
            return Verdict(Outcome.UNKNOWN, reason, _SAME_BLOCKS)
        wrong = wrong or "pairs them wrongly behind a prefix hit"
        return Verdict(Outcome.WRONG, reason + wrong, _SAME_BLOCKS)
    if p.key_order is not d.key_order:
        return Verdict(Outcome.WRONG, _OTHER_KEYS, "use --dtype float32, or like processors")
    parts = f"{p.tp_size} and {d.tp_size} ranks, blocks cut into {p.parts} and {d.parts}"
    reason = f"vLLM reads other bytes than P has ({parts}, {p.layout} and {d.layout})"
    cure = _SAME_RANKS if p.tp_size != d.tp_size else _SAME_BLOCKS
    return Verdict(Outcome.WRONG, reason, cure if p.layout == d.layout else _SAME_LAYOUT)


def _refusals(pair: Pair) -> Iterator[tuple[str, str]]:
    """The reasons for which a release's own handshake refuses P, and the cures."""
    p, d = pair.sides
    facts, is_mla = d.facts, d.caches.is_mla
    theirs, ours = p.kernel_tokens, d.kernel_tokens
    tokens = f"P's blocks have {theirs} tokens and D's {ours}"
    ranks = f"P has {p.tp_size} ranks and D {d.tp_size}"
    is_shared = p.tp_size > d.caches.kv_heads - facts.counts_one_head
    if max(p.tp_size, d.tp_size) % min(p.tp_size, d.tp_size):
        yield ranks, _SAME_RANKS
    if ours % theirs:
        yield f"{tokens}, no multiple of P's", _SAME_BLOCKS
    if theirs != ours and d.caches.has_groups and not facts.joins_in_groups:
        yield f"{tokens}, and there are several block tables", _SAME_BLOCKS
    if not is_mla and p.layout != d.layout:
        yield f"P states the layout {p.layout} and D {d.layout}", _SAME_LAYOUT
    if not is_mla and p.tp_size != d.tp_size:
        if p.tp_size > d.tp_size and is_shared:
            yield f"{ranks}, and P's share {d.caches.kv_heads} KV heads", _SAME_RANKS
        if not is_shared and d.layout not in ("HND", "LBHNC"):
            yield f"heads are not in one piece in layout {d.layout}", "use HND on both sides"
        if p.tp_size > d.tp_size and theirs != ours:
            yield f"{ranks}, and {tokens}", f"{_SAME_RANKS}, or one --block-size"
    sizes = [one.heads * one.caches.first.head_dim * one.item_bytes for one in pair.sides]
    expected = sizes[1] * d.tp_size // p.tp_size
    if facts.reads_its_share:
        expected = sizes[1] * p.heads // d.heads
    if sizes[0] != (sizes[1] if is_mla or is_shared else expected):
        cure = "use one --dtype and one --kv-cache-dtype on both sides"
        cure = cure if p.tp_size == d.tp_size else _SAME_RANKS
        yield "a token of P has other bytes than one of D", cure
    by_row, joins = d.key_order is KeyOrder.ROW_MAJOR, facts.pairs_heads_by_layout
    if theirs < ours and by_row and not (is_mla or joins) and d.heads < ours // theirs:
        yield f"{tokens}, and D ends over {d.heads} heads", _SAME_BLOCKS


# --- the factors of the compatibility hash, which P and D must have alike -----------------

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
