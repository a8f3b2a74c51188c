"""What kvpatch on D does with a pair: the decision of the engine's own handshake."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions, PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.load.smaller_blocks_admission import JoiningCache, why_joined_wrongly
from kvpatch.peer.agent_metadata import AgentMetadata, StatedBlocks
from kvpatch.peer.cpu_keys import BY_WORD, word_of
from kvpatch.peer.decision import Decision, LocalCache, Read, Refuse, decide
from kvpatch.peer.remote_ranks import RemoteRank
from kvpatch.peer.unlike_releases.peer_releases import speak_alike
from kvpatch.peer.unread_caches import UnreadCache
from kvpatch.peer.unstated_blocks import DeclaredGeometry, leaves_open
from kvpatch.tools.planning.accepted import named_difference
from kvpatch.tools.planning.arguments import whole_number
from kvpatch.tools.planning.caches import RankCache, rank_cache
from kvpatch.tools.planning.engine import PlannedEngine
from kvpatch.tools.planning.factors import is_of_states_alike_in_size, uncompared_factors
from kvpatch.tools.planning.pair import Outcome, Pair, Request, Verdict
from kvpatch.tools.planning.stock import start_problem, stock_verdict, unregistered
from kvpatch.worker.cache_kinds import LATENT, ROWS, Kind
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.speculative_decoding import hides_ends_of_lists
from kvpatch.worker.state_division import StateDivision


@dataclass(frozen=True)
class Judged:
    """What kvpatch makes of a pair.

    Attributes:
        verdict: of a request.
        way: "vLLM's own", "read by kvpatch", or "refused".
        mappings: of the ranks that D's first rank reads; empty where it reads none.
    """

    verdict: Verdict
    way: str
    mappings: tuple[RemoteRank, ...] = ()


def judged_by_kvpatch(pair: Pair, request: Request) -> Judged:
    """What becomes of a request where D has kvpatch, and P is stock."""
    for engine in (pair.prefill, pair.decode):
        found = start_problem(engine)
        if found is not None:
            return Judged(found, "refused")
        if engine.backend.is_unregistered(engine.facts):
            return Judged(Verdict(Outcome.REFUSED_AT_START, *unregistered(engine)), "refused")
    unseen = next(uncompared_factors(pair), None)
    if unseen is not None and is_of_states_alike_in_size(pair, unseen) and not _says_types(pair):
        reason = f"{unseen}, of as many bytes, and nobody compares them"
        return Judged(Verdict(Outcome.WRONG, reason, unseen.cure), "vLLM's own")
    if unseen is not None:
        return Judged(Verdict(Outcome.REFUSED, str(unseen), unseen.cure), "refused")
    try:
        named = named_difference(pair)
    except PeerRefused as error:
        return Judged(Verdict(Outcome.REFUSED, error.reason, error.cure), "refused")
    facts = pair.decode.facts
    decisions = [
        decide(
            local_cache(pair.decode, rank),
            _as_asked(
                pair, rank, replace(rank_cache(pair.prefill, met).stated(facts), named=named)
            ),
            facts,
        )
        for rank in sorted({0, pair.decode.tp_size - 1})
        for met in pair.ranks_met(rank)
    ]
    if named is not None:  # what the release is left with has blocks of one form
        prefill = replace(pair.prefill, facts=facts, backend=pair.decode.backend)
        pair = Pair(prefill, pair.decode)
    return _judged(pair, request, decisions)


def _as_asked(pair: Pair, rank: int, peer: AgentMetadata) -> AgentMetadata:
    """Returns what a rank of P states, with what its kvpatch adds where D asks for that."""
    p = pair.prefill
    if not p.has_kvpatch:
        return peer
    keys = p.key_order if word_of(p.key_order) else None
    blocks = StatedBlocks(p.block_tokens, p.kernel_tokens, p.inner_layout)
    is_asked = not pair.decode.has_mirror and leaves_open(
        rank_cache(pair.decode, rank).geometry, peer
    )
    return replace(peer, stated_keys=keys, stated_blocks=blocks if is_asked else None)


def _says_types(pair: Pair) -> bool:
    """Whether P's own kvpatch tells D of which types its states are."""
    p, facts = pair.prefill, pair.decode.facts
    is_asked = facts.encodes_metadata and speak_alike((p.facts.release,), facts)
    return p.has_kvpatch and is_asked


def _wrongly_read(pair: Pair, decisions: Iterable[Decision]) -> Verdict | None:
    """What becomes of a P that D takes for another, by what was declared or left open."""
    p, facts = pair.prefill, pair.decode.facts
    for one in decisions:
        if not isinstance(one, Read):
            continue
        peer, variables = one.mapping.metadata, []
        if p.knows_processor and peer.key_order not in (None, p.key_order):
            variables.append(settings.PEER_KEYS)
        if not facts.states_kernel_blocks and peer.form is None and peer.releases == ():
            if (peer.block_tokens, peer.kernel_blocks_per_block or 1) != (p.kernel_tokens, p.parts):
                variables.append(settings.PEER_BLOCK_SIZE)
            if not facts.states_layout and peer.layout not in (None, p.inner_layout):
                variables.append(settings.PEER_LAYOUT)
        if variables:
            reason = f"by {' and '.join(variables)} on D P is taken for what it is not"
            return Verdict(Outcome.WRONG, reason, "set it to what P has, or unset it")
    return None


def _judged(pair: Pair, request: Request, decisions: list[Decision]) -> Judged:
    for one in decisions:
        if isinstance(one, Refuse):  # without the number of blocks, which no argument says
            reason = re.sub(r"\d+ blocks in (\d+ regions)", r"\1", one.reason)
            return Judged(Verdict(Outcome.REFUSED, reason, one.cure), "refused")
    of_first = decisions[: len(pair.ranks_met(0))]
    wrong = _wrongly_read(pair, decisions)
    if wrong is not None:
        return Judged(wrong, "read by kvpatch")
    if any(isinstance(one, Read) for one in decisions):
        mappings = tuple(one.mapping for one in of_first if isinstance(one, Read))
        return Judged(Verdict(Outcome.IDENTICAL), "read by kvpatch", mappings)
    found = stock_verdict(pair, request)
    if found.outcome is Outcome.WRONG and pair.prefill.kernel_tokens < pair.decode.kernel_tokens:
        # The release is handed those of P's blocks that it pairs rightly, or the request fails.
        reason = "vLLM reads it; a request whose blocks it would pair wrongly fails alone"
        found = Verdict(Outcome.IDENTICAL, reason)
    return Judged(found, "vLLM's own")


# --- D's side -----------------------------------------------------------------------


def local_cache(engine: PlannedEngine, rank: int) -> LocalCache | UnreadCache:
    """A rank's cache, as the engine's own decision has it.

    Raises:
        BadOptions: a variable of kvpatch's holds what it cannot take.
    """
    facts = engine.facts
    joining = JoiningCache(
        engine.key_order, 1, engine.model.is_mla, engine.layout if facts.states_layout else None
    )
    misread = partial(why_joined_wrongly, joining, facts)
    if engine.has_mirror:
        return UnreadCache(
            engine.kernel_tokens,
            engine.tp_size,
            engine.layout if facts.states_layout else None,
            engine.backend.name,
            has_heads=not engine.model.is_mla,
            kinds=partial(_kinds, engine),
            divisions=partial(_divisions, engine),
            misreads_smaller=misread,
            mirror_layout=None if facts.cache_shape == "packed" else "NHD",
        )
    own: RankCache = rank_cache(engine, rank)
    planes = [plane for layer in own.geometry.layers.values() for plane in layer.planes]
    return LocalCache(
        own.geometry,
        planes,
        staging_bytes=staging_bytes(engine) if transfer_mode(engine) == "staged" else None,
        reads_all=own.geometry.misreads_blocks,
        hides_ends=_hides_ends(engine),
        declared=_declared(engine),
    )


def _hides_ends(engine: PlannedEngine) -> bool:
    """Whether drafted tokens hide where lists of blocks end, as the engine itself tells it."""
    asked = engine.arguments.mapping("speculative_config")
    method = asked.get("method") or "draft_model"
    configuration = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method) if asked else None
    )
    windows = engine.model.windows if engine.has_groups else (0,)
    groups = [Group(frozenset(), window) for window in sorted(set(windows))]
    return hides_ends_of_lists(configuration, groups, layers_differ_in_shape=False)


def transfer_mode(engine: PlannedEngine) -> str:
    """``KVPATCH_TRANSFER`` of an engine."""
    found = engine.arguments.environment.get(settings.TRANSFER, "").lower()
    found = found or settings.TRANSFERS[0]
    if found not in settings.TRANSFERS:
        known = ", ".join(settings.TRANSFERS)
        raise BadOptions(
            f"{settings.TRANSFER}={found!r} is not one of {known}", "set one of these, or unset it"
        )
    return found


def staging_bytes(engine: PlannedEngine) -> int:
    """Of an engine's staging pool."""
    found = engine.arguments.environment.get(settings.STAGING_BYTES)
    if not found:
        return settings.DEFAULT_STAGING_BYTES
    return whole_number(found, settings.STAGING_BYTES)


def _declared(engine: PlannedEngine) -> DeclaredGeometry:
    variables = engine.arguments.environment
    tokens = variables.get(settings.PEER_BLOCK_SIZE)
    return DeclaredGeometry(
        whole_number(tokens, settings.PEER_BLOCK_SIZE) if tokens else None,
        variables.get(settings.PEER_LAYOUT, "").upper() or None,
        _declared_keys(engine),
    )


def _declared_keys(engine: PlannedEngine) -> KeyOrder | None:
    found = engine.arguments.environment.get(settings.PEER_KEYS, "").lower()
    if found and found not in BY_WORD:
        raise BadOptions(
            f"{settings.PEER_KEYS}={found!r} is not one of {', '.join(BY_WORD)}",
            "set one of these, or unset it",
        )
    return BY_WORD.get(found)


def _divisions(engine: PlannedEngine) -> Mapping[str, StateDivision]:
    if engine.division is None:
        return {}
    return {f"layer.{number}": engine.division for number in engine.model.state_layers}


def _kinds(engine: PlannedEngine) -> Mapping[str, Kind]:
    kind = LATENT if engine.model.is_mla else ROWS
    return {f"layer.{number}": kind for number in engine.model.attention_layers}
