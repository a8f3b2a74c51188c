"""What stock vLLM does with a pair.

First what an engine says when it starts; then the release's checks at the handshake, in their
order; then what it makes of a load that they refuse; and last, of a peer that they let pass, which
bytes come where. Whether these are the right ones is told by what the engine's own decision leans
on (:func:`~kvpatch.peer.compatibility.is_compatible`,
:mod:`~kvpatch.load.smaller_blocks_admission`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvpatch.core.errors import CannotPlan, PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.load.smaller_blocks_admission import JoiningCache, why_joined_wrongly
from kvpatch.peer.compatibility import is_compatible
from kvpatch.peer.remote_states import has_copied_states
from kvpatch.tools.planning.caches import rank_cache
from kvpatch.tools.planning.engine import PlannedEngine
from kvpatch.tools.planning.factors import compared_factors, uncompared_factors
from kvpatch.tools.planning.pair import Outcome, Pair, Request, Verdict

_STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
_SAME_BLOCKS = "use one --block-size on both sides"
_SAME_LAYOUT = "use one VLLM_KV_CACHE_LAYOUT on both sides"
_SAME_RANKS = "use one --tensor-parallel-size on both sides"


def stock_verdict(pair: Pair, request: Request) -> Verdict:
    """What becomes of a request between engines without kvpatch.

    Raises:
        CannotPlan: nobody has seen what.
    """
    if _has_unlike_states(pair) and max(pair.prefill.tp_size, pair.decode.tp_size) > (
        pair.decode.model.kv_heads
    ):
        raise CannotPlan(
            "recurrent state over unlike ranks that share KV heads is not planned for", _SAME_RANKS
        )
    for engine in (pair.prefill, pair.decode):
        found = start_problem(engine) or _registers_otherwise(engine)
        if found is not None:
            return found
    refusal = next(_refusals(pair), None)
    if refusal is None:
        unseen = next(uncompared_factors(pair), None)
        if unseen is not None:
            return Verdict(Outcome.WRONG, f"{unseen}, and nobody compares them", unseen.cure)
        _refuse_other_drafts(pair)
        return _wrong_mirror(pair) or _read(pair, request)
    verdict = _reaction(pair, refusal)
    if verdict.outcome is not Outcome.CRASH and request.cached >= request.tokens:
        return replace(verdict, outcome=Outcome.NOT_TOLD)
    return verdict


def _wrong_mirror(pair: Pair) -> Verdict | None:
    """Of unlike blocks or ranks, where a mirror has another layout than it states (<= 0.25)."""
    p, d = pair.prefill, pair.decode
    is_like = p.tp_size == d.tp_size and p.kernel_tokens == d.kernel_tokens
    if is_like or not d.has_mirror or d.model.is_mla or d.facts.cache_shape == "packed":
        return None
    reason = "vLLM's own host buffer has layout NHD whatever it states, and takes heads for tokens"
    return Verdict(Outcome.WRONG, reason, f"{_SAME_BLOCKS}, and {_SAME_RANKS}")


def _refuse_other_drafts(pair: Pair) -> None:
    """Raises CannotPlan where convolutions have states of unlike lengths."""
    p, d = pair.prefill, pair.decode
    if d.division is not None and p.drafted_tokens != d.drafted_tokens:
        raise CannotPlan(
            f"P speculates with {p.drafted_tokens} tokens and D with {d.drafted_tokens}: nobody "
            "has seen what stock does with a convolution's states, which differ in length then",
            "speculate alike on both sides",
        )


def _unlike_processors(pair: Pair) -> Verdict:
    """Of blocks that vLLM takes for alike: a processor with AMX has a CPU's in tiles."""
    p, d = pair.prefill, pair.decode
    if p.key_order is d.key_order or KeyOrder.ROW_MAJOR in (p.key_order, d.key_order):
        return Verdict(Outcome.IDENTICAL)
    with_amx, other = ("P", "D") if p.key_order is KeyOrder.TILED else ("D", "P")
    return Verdict(
        Outcome.WRONG,
        f"{with_amx}'s processor has AMX and {other}'s has not, which puts keys and values of "
        "bfloat16 elsewhere, and nobody compares them",
        "use --dtype float32, or processors of one kind",
    )


def start_problem(engine: PlannedEngine) -> Verdict | None:
    """Why an engine does not start with the connector, stock or not; None where it does."""
    facts, device = engine.facts, engine.device_type
    known = engine.known_buffer_devices
    if engine.buffer_device not in known:
        reason = f"{engine.role}: vLLM {facts.release} has no connector for {device}"
        cure = "use another release"
        if known:
            reason = f"{engine.role}: kv_buffer_device {engine.buffer_device} is not for {device}"
            cure = f'set "kv_buffer_device": "{known[0]}" in its --kv-transfer-config'
        return Verdict(Outcome.REFUSED_AT_START, reason, cure)
    if engine.backend.device == "cpu" and facts.names_layouts and engine.layout == "LBNHC":
        return Verdict(
            Outcome.REFUSED_AT_START,
            f"{engine.role}: {engine.backend.name} has one layout, and VLLM_KV_CACHE_LAYOUT asks "
            "for another",
            "unset VLLM_KV_CACHE_LAYOUT",
        )
    heads, ranks = engine.model.kv_heads, engine.tp_size
    if engine.model.heads % ranks or (heads % ranks and ranks % heads):
        return Verdict(
            Outcome.REFUSED_AT_START,
            f"{engine.role}: {ranks} ranks cannot share {engine.model.heads} heads and {heads} KV "
            "heads",
            "use a --tensor-parallel-size that divides them",
        )
    layout = engine.arguments.environment.get(_STATE_LAYOUT, "").upper()
    has_started = engine.arguments.running is not None  # and does not say this variable
    if engine.division is not None and layout != "DS" and not has_started:
        return Verdict(
            Outcome.REFUSED_AT_START,
            f"{engine.role}: a model with recurrent states does not start with NixlConnector",
            f"set {_STATE_LAYOUT}=DS",
        )
    if engine.backend.device == "cpu" and facts.cache_shape == "blocks first":
        return Verdict(
            Outcome.REFUSED_AT_START,
            f"{engine.role}: vLLM {facts.release} takes blocks of a CPU's cache for its keys and "
            "values, and does not register them",
            "use vLLM <= 0.22 or 0.26 and later",
        )
    return None


def _registers_otherwise(engine: PlannedEngine) -> Verdict | None:
    if not engine.backend.is_unregistered(engine.facts):
        return None
    reason, cure = unregistered(engine)
    return Verdict(Outcome.CRASH, f"{reason}, and D ends at the first request", cure)


def unregistered(engine: PlannedEngine) -> tuple[str, str]:
    """What is wrong with a cache that the release takes for another, and what helps."""
    return (
        f"{engine.role}: vLLM {engine.facts.release} takes blocks of {engine.backend.name} for a "
        "layer's keys and values",
        "use another attention backend, or vLLM 0.11.1 or later",
    )


# --- the handshake -----------------------------------------------------------------


@dataclass(frozen=True)
class _Refusal:
    """A check of the release's that a peer does not pass.

    Attributes:
        is_booked: whether the peer is in the release's books by then.
        ends_next: whether it comes so late that the next handshake finds all done, and passes: the
            read that follows asks for what was never made.
    """

    reason: str
    cure: str
    is_booked: bool = True
    ends_next: bool = False


def _refusals(pair: Pair) -> Iterator[_Refusal]:
    """The checks that a peer does not pass, in the order of the release."""
    p, d = pair.prefill, pair.decode
    facts = d.facts
    if facts.encodes_metadata:
        yield from _unlike_factors(pair, is_booked=False)
    smaller, larger = sorted((p.tp_size, d.tp_size))
    if larger % smaller or (facts.meets_one_rank and p.tp_size > d.tp_size):
        yield _Refusal(f"P has {p.tp_size} ranks and D {d.tp_size}", _SAME_RANKS, is_booked=False)
    if facts.compares_block_sizes_first and p.kernel_tokens > d.kernel_tokens:
        said = f"P's blocks have {p.kernel_tokens} tokens and D's {d.kernel_tokens}"
        yield _Refusal(f"{said}: larger ones are not read", _SAME_BLOCKS, is_booked=False)
    if not facts.encodes_metadata:
        yield from _unlike_factors(pair, is_booked=True)
    if facts.states_block_size:
        yield from _unlike_blocks(pair)
        yield from _unlike_layouts(pair)
        yield from _unlike_ranks(pair)
    if _block_bytes(pair) != _expected_bytes(pair):
        cure = _SAME_BLOCKS if p.kernel_tokens != d.kernel_tokens else _SAME_RANKS
        if p.kernel_tokens == d.kernel_tokens and p.tp_size == d.tp_size:
            cure = "use one --dtype and one --kv-cache-dtype on both sides"
        yield _Refusal("a block of P has other bytes than one of D", cure)


def _unlike_factors(pair: Pair, *, is_booked: bool) -> Iterator[_Refusal]:
    for factor in compared_factors(pair):
        yield _Refusal(str(factor), factor.cure, is_booked)


def _unlike_blocks(pair: Pair) -> Iterator[_Refusal]:
    theirs, ours = pair.prefill.kernel_tokens, pair.decode.kernel_tokens
    said = f"P's blocks have {theirs} tokens and D's {ours}"
    if ours % theirs:
        yield _Refusal(f"{said}, no multiple of P's", _SAME_BLOCKS)
    if pair.decode.has_groups and theirs != ours and not pair.decode.facts.joins_in_groups:
        yield _Refusal(f"{said}, and there are several block tables", _SAME_BLOCKS)
    if theirs != ours and pair.decode.has_mirror and pair.decode.facts.joins_in_groups:
        yield _Refusal(f"{said}, and D has a host buffer", _SAME_BLOCKS)


def _unlike_layouts(pair: Pair) -> Iterator[_Refusal]:
    p, d = pair.prefill, pair.decode
    if d.model.is_mla or p.layout == d.layout:
        return
    yield _Refusal(f"P states the layout {p.layout} and D {d.layout}", _SAME_LAYOUT)


def _unlike_ranks(pair: Pair) -> Iterator[_Refusal]:
    p, d = pair.prefill, pair.decode
    if p.tp_size == d.tp_size or d.model.is_mla:
        return
    is_shared = _shares_heads(pair)
    if p.tp_size > d.tp_size and is_shared:
        yield _Refusal(f"P's {p.tp_size} ranks share {d.model.kv_heads} KV heads", _SAME_RANKS)
    splits_heads = d.facts.topology == "transfer_topo" and not is_shared
    if splits_heads and d.layout not in ("HND", "LBHNC"):
        yield _Refusal(f"heads are not in one piece in layout {d.layout}", "use HND on both sides")
    if p.tp_size > d.tp_size and p.kernel_tokens != d.kernel_tokens:
        cure = f"{_SAME_RANKS}, or one --block-size"
        # Without recurrent state it is an earlier check, which the next request meets as well.
        is_late = bool(d.model.state_layers) and d.facts.joins_in_groups
        yield _Refusal("P has more ranks, and other blocks", cure, ends_next=is_late)


def _shares_heads(pair: Pair) -> bool:
    """Whether the release takes P's ranks for ones that share heads."""
    ranks, heads = pair.prefill.tp_size, pair.decode.model.kv_heads
    return ranks >= heads if pair.decode.facts.counts_one_head else ranks > heads


def _block_bytes(pair: Pair) -> int:
    return _bytes_of(pair.prefill)


def _expected_bytes(pair: Pair) -> int:
    """Of a block of P's, as D comes to it from one of its own."""
    p, d = pair.prefill, pair.decode
    own = _bytes_of(d)
    if d.facts.states_block_size:
        own = own * p.kernel_tokens // d.kernel_tokens
    if d.model.is_mla or _shares_heads(pair):
        return own
    if d.facts.reads_its_share:
        return own * p.heads // d.heads
    return own * d.tp_size // p.tp_size


def _bytes_of(engine: PlannedEngine) -> int:
    """Of a kernel block's keys."""
    return engine.kernel_tokens * engine.heads * engine.model.head_dim * engine.item_bytes


# --- a load that is refused -----------------------------------------------------------


def _reaction(pair: Pair, refusal: _Refusal) -> Verdict:
    """What the release makes of a load whose handshake has failed.

    <= 0.11.0 the engine ends. From 0.11.1 to 0.21 a failed load goes the way of a received one, and
    the engine ends where that asks for what the handshake has not left behind, or where the blocks
    cannot be put together. Later ones fail the request alone; but <= 0.29 the scheduler does not
    hear of it where layers have several block tables, and answers from blocks that nobody filled.
    From 0.27 on the engine may end at the request that comes next.
    """
    d = pair.decode
    ends = ", and D ends at the next request" if refusal.ends_next else ""
    if d.facts.failed_loads == "unknown" or (
        d.facts.failed_loads == "as received" and _ends_engine(pair, refusal)
    ):
        return Verdict(Outcome.CRASH, f"{refusal.reason}, and D ends", refusal.cure)
    if d.facts.loses_failed_groups and d.has_groups:
        lost = f"{refusal.reason}, and a refused load of several cache groups counts as received"
        return Verdict(Outcome.WRONG, f"{lost}{ends}", refusal.cure)
    outcome = Outcome.CRASH if refusal.ends_next else Outcome.REFUSED
    return Verdict(outcome, f"{refusal.reason}{ends}", refusal.cure)


def _ends_engine(pair: Pair, refusal: _Refusal) -> bool:
    p, d = pair.prefill, pair.decode
    if not refusal.is_booked or d.kernel_tokens % p.kernel_tokens:
        return True
    only_hnd = d.facts.meets_one_rank and d.layout != "HND"
    is_joined = d.kernel_tokens > p.kernel_tokens and not d.model.is_mla and not only_hnd
    return is_joined and _has_blocks_first(d)


def _has_blocks_first(engine: PlannedEngine) -> bool:
    return engine.backend.order(engine.facts).dimensions[:2] == ("block", "kv")


# --- a peer that passes -----------------------------------------------------------------


def _read(pair: Pair, request: Request) -> Verdict:
    p, d = pair.prefill, pair.decode
    if request.cached >= request.tokens:
        return Verdict(Outcome.IDENTICAL)
    if _has_unlike_states(pair) and _has_copied_states(pair):
        return Verdict(
            Outcome.WRONG,
            "the convolutions of all heads share a group, which every rank has whole, and vLLM "
            "takes it for shared out (vLLM #55208)",
            _SAME_RANKS,
        )
    if p.kernel_tokens != d.kernel_tokens:
        found = _joined(d, p) or _half_filled(pair, request)
        if found is not None:
            return found
    else:
        try:
            is_right = all(_is_compatible(pair, rank) for rank in range(d.tp_size))
        except PeerRefused:
            is_right = False
        if not is_right:
            return Verdict(Outcome.WRONG, _why_wrong(pair), _how_alike(pair))
    if p.parts != d.parts:
        if not d.facts.states_kernel_blocks:
            return _cut_otherwise(pair, request)
        if d.facts.expands_by_own_cut and p.parts > 1:
            return _expanded_otherwise(pair, request)
    if not _pairs_by_token(pair, request):
        return Verdict(
            Outcome.WRONG,
            f"blocks of {p.kernel_tokens} and {d.kernel_tokens} tokens are paired by their places "
            "in two lists, which is wrong behind a prefix hit",
            f"{_SAME_BLOCKS}, or --no-enable-prefix-caching on D",
        )
    return _unlike_processors(pair)


def _has_unlike_states(pair: Pair) -> bool:
    """Whether ranks of P have other shares of recurrent states than D's."""
    has_states = bool(pair.decode.model.state_layers)
    return has_states and pair.prefill.tp_size != pair.decode.tp_size


def _has_copied_states(pair: Pair) -> bool:
    ours, met = rank_cache(pair.decode, 0).geometry, pair.ranks_met(0)[0]
    return has_copied_states(ours, rank_cache(pair.prefill, met).stated(pair.decode.facts))


def _cut_otherwise(pair: Pair, request: Request) -> Verdict:
    """0.11.1 to 0.20 D takes P's blocks for ones that are cut as its own are.

    Where it comes to want more kernel blocks than P names, it ends.
    """
    p, d = pair.prefill, pair.decode
    named = -(-request.tokens // p.block_tokens)
    named *= d.parts if d.facts.expands_remote_blocks else 1
    return Verdict(
        Outcome.CRASH if _wanted(d, request) > named else Outcome.WRONG,
        f"P's blocks of {p.block_tokens} tokens are {p.parts} kernel blocks and D's of "
        f"{d.block_tokens} are {d.parts}, which the handshake does not say",
        _SAME_BLOCKS,
    )


def _expanded_otherwise(pair: Pair, request: Request) -> Verdict:
    """0.21 D names as many kernel blocks in each of P's blocks as its own blocks have."""
    p, d = pair.prefill, pair.decode
    named = -(-request.tokens // p.block_tokens) * d.parts
    ends = (
        _wanted(d, request) > named and p.kernel_tokens == d.kernel_tokens
    )  # else the list is cut
    return Verdict(
        Outcome.CRASH if ends else Outcome.WRONG,
        f"P's blocks of {p.block_tokens} tokens are {p.parts} kernel blocks, of which vLLM "
        f"{d.facts.release} reads {d.parts}, as many as there are in D's own",
        _SAME_BLOCKS,
    )


def _wanted(d: PlannedEngine, request: Request) -> int:
    """Kernel blocks of D's own that a request is to fill."""
    return (-(-request.tokens // d.block_tokens) - request.cached // d.block_tokens) * d.parts


def _joined(d: PlannedEngine, p: PlannedEngine) -> Verdict | None:
    """What comes of P's smaller blocks in D's larger ones; None where they are put together."""
    facts = d.facts
    said = f"P's blocks of {p.kernel_tokens} tokens become D's of {d.kernel_tokens}"
    if d.model.is_mla:
        return None
    if facts.topology_has_block_size and d.backend.device == "cpu":
        said = "D takes heads for the tokens of a block (0.11.1 and 0.11.2)"
        return Verdict(Outcome.CRASH, said, _SAME_BLOCKS)
    if _has_blocks_first(d):
        ends = facts.failed_loads == "as received"
        said = f"{said}, for which it has no descriptors where blocks hold keys and values"
        return Verdict(Outcome.CRASH if ends else Outcome.REFUSED, said, _SAME_BLOCKS)
    if _has_no_share(d, p):
        return Verdict(Outcome.CRASH, f"{said}, and D ends over {d.heads} heads", _SAME_BLOCKS)
    cache = JoiningCache(d.key_order, 1, d.model.is_mla, d.layout)
    reason = why_joined_wrongly(cache, facts)
    return Verdict(Outcome.WRONG, f"{said}: vLLM {reason}", _SAME_BLOCKS) if reason else None


def _half_filled(pair: Pair, request: Request) -> Verdict | None:
    """From 0.29 to 0.31 D's last block of latents is wrong where P's blocks do not fill it."""
    p, d = pair.prefill, pair.decode
    is_wrong = d.facts.names_layouts and not d.facts.pairs_heads_by_layout
    named = -(-request.tokens // p.kernel_tokens)
    if not (d.model.is_mla and is_wrong and named % (d.kernel_tokens // p.kernel_tokens)):
        return None
    return Verdict(
        Outcome.WRONG,
        f"P's {named} blocks of {p.kernel_tokens} tokens do not fill D's last one of "
        f"{d.kernel_tokens}, whose tokens vLLM {d.facts.release} then gets wrong",
        _SAME_BLOCKS,
    )


def _has_no_share(d: PlannedEngine, p: PlannedEngine) -> bool:
    """From 0.26 to 0.31 heads are shared out over smaller blocks, where there are enough."""
    facts = d.facts
    shares_heads = facts.cache_shape == "packed" and not facts.pairs_heads_by_layout
    is_by_row = d.key_order is KeyOrder.ROW_MAJOR
    return shares_heads and is_by_row and d.heads < d.kernel_tokens // p.kernel_tokens


def _is_compatible(pair: Pair, rank: int) -> bool:
    ours = rank_cache(pair.decode, rank).geometry
    theirs = (
        rank_cache(pair.prefill, met).stated(pair.decode.facts) for met in pair.ranks_met(rank)
    )
    # What the handshake leaves open is as D has it, or _read has said otherwise.
    known = (
        replace(
            peer,
            block_tokens=pair.prefill.kernel_tokens,
            kernel_blocks_per_block=ours.kernel_blocks_per_block,
            layout=peer.layout or (pair.prefill.inner_layout if ours.has_heads else ours.layout),
        )
        for peer in theirs
    )
    return all(is_compatible(replace(ours, misreads_blocks=False), peer) for peer in known)


def _why_wrong(pair: Pair) -> str:
    p, d = pair.prefill, pair.decode
    if p.inner_layout != d.inner_layout:
        return f"P's blocks are {p.inner_layout} and D's {d.inner_layout}, and nobody compares them"
    return f"heads of {p.tp_size} and {d.tp_size} ranks are split as if they were in one piece"


def _how_alike(pair: Pair) -> str:
    unlike = pair.prefill.inner_layout != pair.decode.inner_layout
    return _SAME_LAYOUT if unlike else f"{_SAME_RANKS}, or HND on both"


def _pairs_by_token(pair: Pair, request: Request) -> bool:
    """Whether two lists of kernel blocks, paired by their places, are paired by token.

    D's begins behind its prefix hit and is cut into P's kernel blocks. Where it is the longer one
    its end is left out, and where P's is the longer one its beginning.
    """
    p, d = pair.prefill, pair.decode
    if p.kernel_tokens == d.kernel_tokens and p.parts == d.parts:
        return True
    whole = request.cached // d.block_tokens
    ours = (-(-request.tokens // d.block_tokens) - whole) * d.block_tokens // p.kernel_tokens
    theirs = -(-request.tokens // p.block_tokens) * p.parts
    return max(0, theirs - ours) * p.kernel_tokens == whole * d.block_tokens
