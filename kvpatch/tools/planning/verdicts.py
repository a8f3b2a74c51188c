"""The verdicts on a pair: of stock vLLM, and with kvpatch on D.

Both lean on the decision of the engine's own handshake (:func:`~kvpatch.peer.decision.decide`):
what kvpatch leaves to a release, the release reads exactly. Here is added only what stock's
handshake refuses, so that a refusal is told from wrong tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions, CannotPlan, PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import inner_layout
from kvpatch.load.smaller_blocks_admission import JoiningCache, why_joined_wrongly
from kvpatch.peer.agent_metadata import StatedBlocks
from kvpatch.peer.cpu_keys import BY_WORD, word_of
from kvpatch.peer.decision import Decision, LocalCache, Read, Refuse, Stock, decide
from kvpatch.peer.peer_hash import Explanation
from kvpatch.peer.unlike_releases.peer_releases import speak_alike
from kvpatch.peer.unstated_blocks import DeclaredGeometry, leaves_open
from kvpatch.tools.planning.arguments import whole_number
from kvpatch.tools.planning.caches import rank_cache
from kvpatch.tools.planning.engine import PlannedEngine
from kvpatch.tools.planning.factors import (
    Factor,
    accepted_difference,
    compared,
    uncompared,
    unlike_factors,
)
from kvpatch.tools.planning.model import DESCRIBE
from kvpatch.tools.planning.pair import Outcome, Pair, Verdict

_STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
_SAME_BLOCKS = "use one --block-size on both sides"
_SAME_RANKS = "use one --tensor-parallel-size on both sides"
_SAME_LAYOUT = "use one VLLM_KV_CACHE_LAYOUT on both sides"
_HND = ("HND", "LBHNC")


def verdicts(pair: Pair) -> tuple[Verdict, Verdict]:
    """The verdicts on stock engines, and on a D with kvpatch.

    Raises:
        BadOptions: a variable of kvpatch's holds what it cannot take.
        CannotPlan: the pair is not planned for.
    """
    problem = next((found for side in pair.sides for found in start_problems(side)), None)
    if problem is not None:
        return problem, problem
    factors = unlike_factors(pair)
    most = max(side.tp_size for side in pair.sides)
    d = pair.decode
    if d.caches.states and pair.prefill.tp_size != d.tp_size and most > d.caches.kv_heads:
        raise CannotPlan(
            "not planned for: recurrent states over unlike ranks that share KV heads", _SAME_RANKS
        )
    exact = _decisions(pair, _exact(pair.prefill))
    stock = _of_stock(pair, factors, exact)
    ours = _of_kvpatch(pair, factors, exact)
    is_read = any(not isinstance(one, Stock) for one in exact)
    if any(side.drafts for side in pair.sides) and is_read and ours.outcome is Outcome.IDENTICAL:
        raise CannotPlan(
            "not planned for: drafts with layers in a pair of unlike engines", DESCRIBE
        )
    return stock, ours


def start_problems(engine: PlannedEngine) -> Iterator[Verdict]:
    """The reasons why an engine does not start with the connector, or not rightly."""
    facts, role, caches = engine.facts, engine.role, engine.caches
    known, device = engine.known_buffer_devices, engine.device_type
    if engine.buffer_device not in known:
        reason = f"vLLM {facts.release} has no connector for {device}"
        cure = "use another release"
        if known:
            reason = f"kv_buffer_device {engine.buffer_device} is not for {device}"
            cure = f'set "kv_buffer_device": "{known[0]}" in its --kv-transfer-config'
        yield _not_started(f"{role}: {reason}", cure)
    is_cpu = engine.backend.device == "cpu"
    if is_cpu and facts.names_layouts and engine.layout not in _HND:
        yield _not_started(
            f"{role}: {engine.backend.name} has one layout, and VLLM_KV_CACHE_LAYOUT asks for "
            "another",
            "unset VLLM_KV_CACHE_LAYOUT",
        )
    heads, ranks = caches.kv_heads, engine.tp_size
    if caches.heads % ranks or (heads % ranks and ranks % heads):
        yield _not_started(
            f"{role}: {ranks} ranks cannot share {caches.heads} heads and {heads} KV heads",
            "use a --tensor-parallel-size that divides them",
        )
    if caches.states and engine.arguments.environment.get(_STATE_LAYOUT, "").upper() != "DS":
        yield _not_started(
            f"{role}: a model with recurrent states does not start with NixlConnector",
            f"set {_STATE_LAYOUT}=DS",
        )
    if (is_cpu and facts.cache_shape == "blocks first") or engine.backend.is_unregistered(facts):
        yield _not_started(
            f"{role}: vLLM {facts.release} takes blocks of {engine.backend.name} for the keys and "
            "values of a layer, and does not register them",
            "use another attention backend, or another release",
        )


def _not_started(reason: str, cure: str) -> Verdict:
    return Verdict(Outcome.REFUSED_AT_START, reason, cure)


# --- the decision of the handshake ----------------------------------------------------------


def _decisions(
    pair: Pair, declared: DeclaredGeometry, named: Explanation | None = None, *, asks: bool = False
) -> list[Decision]:
    """The decisions of D's first and last rank on each rank of P that they meet.

    Args:
        declared: the geometry that D takes P to have where the handshake leaves it open.
        asks: True if P's kvpatch, if there is one, states what the handshake leaves open.
    """
    p, d = pair.sides
    found = []
    for rank in sorted({0, d.tp_size - 1}):
        geometry = rank_cache(d, rank).geometry
        planes = [plane for layer in geometry.layers.values() for plane in layer.planes]
        is_staged = _setting(d, settings.TRANSFER, settings.TRANSFERS) == "staged"
        local = LocalCache(
            geometry,
            planes,
            staging_bytes=_staging_bytes(d) if is_staged else None,
            reads_all=geometry.misreads_blocks,
            declared=declared,
        )
        for met in pair.ranks_met(rank):
            peer = replace(rank_cache(p, met).stated(d.facts), named=named)
            if asks and p.has_kvpatch:
                keys = p.key_order if word_of(p.key_order) else None
                blocks = StatedBlocks(p.block_tokens, p.kernel_tokens, p.inner_layout)
                is_open = leaves_open(geometry, peer)
                peer = replace(peer, stated_keys=keys, stated_blocks=blocks if is_open else None)
            found.append(decide(local, peer, d.facts))
    return found


def _exact(p: PlannedEngine) -> DeclaredGeometry:
    """The geometry that P has."""
    keys = p.key_order if word_of(p.key_order) else None
    return DeclaredGeometry(p.block_tokens, p.inner_layout, keys)


def _declared(d: PlannedEngine) -> DeclaredGeometry:
    """The geometry that the variables on D declare."""
    tokens = d.arguments.environment.get(settings.PEER_BLOCK_SIZE)
    return DeclaredGeometry(
        whole_number(tokens, settings.PEER_BLOCK_SIZE) if tokens else None,
        d.arguments.environment.get(settings.PEER_LAYOUT, "").upper() or None,
        BY_WORD.get(_setting(d, settings.PEER_KEYS, tuple(BY_WORD))),
    )


def _setting(engine: PlannedEngine, name: str, known: tuple[str, ...]) -> str:
    """Reads a setting of kvpatch's that is one of a few words; empty where it is not set."""
    found = engine.arguments.environment.get(name, "").lower()
    if found and found not in known:
        raise BadOptions(
            f"{name}={found!r} is not one of {', '.join(known)}", "set one of these, or unset it"
        )
    return found


def _staging_bytes(engine: PlannedEngine) -> int:
    found = engine.arguments.environment.get(settings.STAGING_BYTES)
    default = settings.DEFAULT_STAGING_BYTES
    return whole_number(found, settings.STAGING_BYTES) if found else default


# --- with kvpatch on D ------------------------------------------------------------------------


def _of_kvpatch(pair: Pair, factors: list[Factor], exact: list[Decision]) -> Verdict:
    p, d = pair.sides
    unseen = next(iter(uncompared(pair, factors)), None)
    if unseen is not None:
        # The bytes of states are compared, and their types only where P's kvpatch states them.
        says_types = p.has_kvpatch and d.facts.encodes_metadata
        says_types = says_types and speak_alike((p.facts.release,), d.facts)
        if not unseen.name and _state_bytes(p) == _state_bytes(d) and not says_types:
            return _unlike_bytes(unseen)
        return Verdict(Outcome.REFUSED, str(unseen), unseen.cure)
    try:
        named = accepted_difference(pair, factors)
    except PeerRefused as error:
        return Verdict(Outcome.REFUSED, error.reason, error.cure)
    found = _decisions(pair, _declared(d), named, asks=True)
    for one in found:
        if isinstance(one, Refuse):  # without the number of blocks, which no argument says
            reason = re.sub(r"\d+ blocks in (\d+ regions)", r"\1", one.reason)
            return Verdict(Outcome.REFUSED, reason, one.cure)
    if named is None and [_taken_for(pair, o) for o in found] != [
        _taken_for(pair, o) for o in exact
    ]:
        return Verdict(
            Outcome.WRONG,
            "D takes P for another engine than it is: its handshake does not say all of its blocks",
            "set ENABLE_KVPATCH on P, or KVPATCH_PEER_BLOCK_SIZE, KVPATCH_PEER_LAYOUT and "
            "KVPATCH_PEER_KEYS on D to what P has",
        )
    is_read = any(isinstance(one, Read) for one in found)
    return Verdict(Outcome.IDENTICAL, way="read by kvpatch" if is_read else "vLLM's own")


def _taken_for(pair: Pair, decision: Decision) -> object:
    """The path that a decision takes, and the blocks that it takes P to have: D's, if unsaid."""
    if isinstance(decision, Refuse):
        return None
    peer = decision.mapping.metadata if isinstance(decision, Read) else decision.peer
    if peer is None:
        return None
    d = pair.decode
    has_sure_keys = pair.prefill.arguments.about.get("amx") is not None
    return (
        type(decision),
        peer.block_tokens or d.kernel_tokens,
        peer.kernel_blocks_per_block or d.parts,
        inner_layout(peer.layout or d.inner_layout),
        has_sure_keys and (peer.key_order or d.key_order),
    )


def _state_bytes(engine: PlannedEngine) -> object:
    return [one.parts for one in engine.caches.states.values()]


def _unlike_bytes(factor: Factor) -> Verdict:
    return Verdict(Outcome.WRONG, f"{factor}, and nothing compares them", factor.cure)


# --- stock vLLM -------------------------------------------------------------------------------


def _of_stock(pair: Pair, factors: list[Factor], exact: list[Decision]) -> Verdict:
    p, d = pair.sides
    refusals = [(str(one), one.cure) for one in compared(pair, factors)]
    refusals += _refusals(pair)
    if refusals:
        reason, cure = refusals[0]
        if d.facts.failed_loads in ("unknown", "as received"):
            reason = f"{reason}, and D may end"
        elif d.facts.loses_failed_groups and d.has_groups:
            reason = f"{reason}, and a refused load of several cache groups counts as received"
            return Verdict(Outcome.WRONG, reason, cure)
        return Verdict(Outcome.REFUSED, reason, cure)
    unseen = next(iter(uncompared(pair, factors)), None)
    if unseen is not None:
        return _unlike_bytes(unseen)
    if all(isinstance(one, Stock) for one in exact):
        return Verdict(Outcome.IDENTICAL, way="vLLM's own")
    differences = "; ".join(_differences(pair))
    joining = JoiningCache(d.key_order, 1, d.caches.is_mla, d.layout)
    is_misread = p.kernel_tokens < d.kernel_tokens and why_joined_wrongly(joining, d.facts)
    if p.kernel_tokens < d.kernel_tokens and not (is_misread or d.has_prefix_cache):
        return Verdict(
            Outcome.UNKNOWN,
            f"{differences}: whether vLLM joins these blocks rightly depends on the prompt",
            _SAME_BLOCKS,
        )
    cures = (_SAME_BLOCKS, _SAME_RANKS, _SAME_LAYOUT)
    places = (p.kernel_tokens != d.kernel_tokens or p.parts != d.parts, p.tp_size != d.tp_size)
    cure = next((one for one, place in zip(cures, (*places, True), strict=True) if place), "")
    if p.key_order is not d.key_order:
        cure = "use --dtype float32, or processors of one kind"
    return Verdict(Outcome.WRONG, f"{differences}: vLLM reads other bytes than P has", cure)


def _differences(pair: Pair) -> Iterator[str]:
    """The sentences on what P and D have unlike."""
    p, d = pair.sides
    if p.key_order is not d.key_order:
        with_amx = "P" if p.key_order is KeyOrder.TILED else "D"
        yield f"only the processor of {with_amx} has AMX, which puts keys of bfloat16 elsewhere"
    if p.kernel_tokens != d.kernel_tokens:
        behind = ", and vLLM pairs them wrongly behind a prefix hit" * d.has_prefix_cache
        yield f"blocks of {p.kernel_tokens} and {d.kernel_tokens} tokens{behind}"
    if p.parts != d.parts:
        yield f"blocks of {p.parts} and {d.parts} kernel blocks"
    if p.tp_size != d.tp_size:
        yield f"{p.tp_size} and {d.tp_size} ranks"
    if p.inner_layout != d.inner_layout:
        yield f"layouts {p.inner_layout} and {d.inner_layout}"


def _refusals(pair: Pair) -> Iterator[tuple[str, str]]:
    """The reasons for which a release's own handshake refuses P, and the cures."""
    p, d = pair.sides
    facts, is_mla = d.facts, d.caches.is_mla
    theirs, ours, ranks = p.kernel_tokens, d.kernel_tokens, (p.tp_size, d.tp_size)
    tokens = f"P's blocks have {theirs} tokens and D's {ours}"
    if max(ranks) % min(ranks) or (facts.meets_one_rank and ranks[0] > ranks[1]):
        yield f"P has {ranks[0]} ranks and D {ranks[1]}", _SAME_RANKS
    if theirs > ours and facts.compares_block_sizes_first:
        yield f"{tokens}: larger ones are not read", _SAME_BLOCKS
    if facts.states_block_size:
        if ours % theirs:
            yield f"{tokens}, no multiple of P's", _SAME_BLOCKS
        if theirs != ours and d.has_groups and not facts.joins_in_groups:
            yield f"{tokens}, and there are several block tables", _SAME_BLOCKS
        if not is_mla and p.layout != d.layout:
            yield f"P states the layout {p.layout} and D {d.layout}", _SAME_LAYOUT
        if not is_mla and ranks[0] != ranks[1]:
            yield from _refused_ranks(pair)
    sizes = _block_bytes(pair)
    if sizes[0] != sizes[1]:
        yield "a block of P has other bytes than one of D", (
            _SAME_BLOCKS if theirs != ours else _SAME_RANKS if ranks[0] != ranks[1] else
            "use one --dtype and one --kv-cache-dtype on both sides"
        )  # fmt: skip
    if theirs < ours and not is_mla:
        starts = d.backend.order(facts).dimensions[:2]
        shares = facts.cache_shape == "packed" and not facts.pairs_heads_by_layout
        is_by_row = d.key_order is KeyOrder.ROW_MAJOR
        if starts == ("block", "kv") or (facts.topology_has_block_size and d.device == "cpu"):
            yield f"{tokens}, and D has no descriptors for the parts of its blocks", _SAME_BLOCKS
        elif shares and is_by_row and d.heads < ours // theirs:
            yield f"{tokens}, and D ends over {d.heads} heads", _SAME_BLOCKS


def _refused_ranks(pair: Pair) -> Iterator[tuple[str, str]]:
    p, d = pair.sides
    is_shared = _shares_heads(pair)
    if p.tp_size > d.tp_size and is_shared:
        yield f"P's {p.tp_size} ranks share {d.caches.kv_heads} KV heads", _SAME_RANKS
    if d.facts.topology == "transfer_topo" and not is_shared and d.layout not in _HND:
        yield f"heads are not in one piece in layout {d.layout}", "use HND on both sides"
    if p.tp_size > d.tp_size and p.kernel_tokens != d.kernel_tokens:
        yield "P has more ranks, and other blocks", f"{_SAME_RANKS}, or one --block-size"


def _shares_heads(pair: Pair) -> bool:
    """True if the release takes P's ranks for ones that share heads."""
    ranks, heads = pair.prefill.tp_size, pair.decode.caches.kv_heads
    return ranks >= heads if pair.decode.facts.counts_one_head else ranks > heads


def _block_bytes(pair: Pair) -> tuple[int, int]:
    """Bytes of the keys of P's kernel block, and of what D expects by one of its own."""
    theirs, own = (
        one.kernel_tokens * one.heads * one.caches.first.head_dim * one.item_bytes
        for one in pair.sides
    )
    p, d = pair.sides
    if d.facts.states_block_size:
        own = own * p.kernel_tokens // d.kernel_tokens
    if d.caches.is_mla or _shares_heads(pair):
        return theirs, own
    if d.facts.reads_its_share:
        return theirs, own * p.heads // d.heads
    return theirs, own * d.tp_size // p.tp_size
