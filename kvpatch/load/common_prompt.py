"""The tokens of a prompt that D loads: those that P holds of D's own prompt, and no more."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from kvpatch.core import settings
from kvpatch.core.recent_engines import RecentEngines
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import one_line, shown
from kvpatch.load.prompt_hashes import absent_images, lacks_images, names_images, read_prompt
from kvpatch.load.read_request import (
    HOLD,
    FailingLoads,
    PlannedLoad,
    PlannedLoads,
    groups,
    leave_unread,
    prefilled_tokens,
    stated_tokens,
)
from kvpatch.observe.catalogue import PROMPTS, Prompt
from kvpatch.worker.kv_cache_groups import (
    begins_behind_window,
    counted_block_tokens,
    counted_group,
    drafted_tokens,
    fills_no_more_blocks,
    has_state,
    has_windows,
    is_of_whole_prompt,
    still_has,
    window_alone,
)
from kvpatch.worker.state import scheduler_state

_LOG = logging.getLogger("kvpatch.prompts")
_ENGINES_LOG = logging.getLogger("kvpatch.unlike_engines")

_SENTENCES = {
    Prompt.PART: "is not the prompt that this engine was sent: it loads what both have in common",
    Prompt.UNSTATED: "comes without hashes of its tokens, so that this engine cannot tell whether "
    "it was sent the same prompt: run kvpatch on P too, and pass on all that P answers. "
    "KVPATCH_REQUIRE_TOKENS=true computes such prompts here",
    Prompt.REFUSED: "comes without hashes of its tokens and is computed here, as "
    "KVPATCH_REQUIRE_TOKENS asks: run kvpatch on P too, and pass on all that P answers",
    Prompt.UNFILLED: "is computed here: its smaller blocks would fill a block of a sliding window "
    "in part, which another connector of this engine may store. Give P and D one block size",
}
_NAMES = ("remote_engine_id", "remote_request_id", "remote_block_ids", HOLD)


@dataclass(eq=False)
class PromptLoads:
    """The answers of P that one scheduler's requests carry, and what each request loads."""

    #: By answer, the first request that carries it.
    _takers: RecentEngines[ReferenceType[Any]] = field(default_factory=RecentEngines)
    #: By request, the one with the same answer that it waits for.
    _waiting: WeakKeyDictionary[Any, ReferenceType[Any]] = field(default_factory=WeakKeyDictionary)
    #: What was logged of each peer.
    told: RecentEngines[bool] = field(default_factory=RecentEngines)
    #: True if other connectors may store this engine's blocks, by the hashes of their tokens.
    has_company: bool = False
    #: Requests that need none of P's blocks, and those that P may write, by their tokens: what is
    #: asked in each step until there are blocks for them.
    _unneeded: WeakSet[Any] = field(default_factory=WeakSet)
    _pushable: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)

    def must_wait(self, request: Any) -> bool:
        """True while another request loads the answer of P that this one carries."""
        taker = self._waiting.get(request)
        loading = None if taker is None else taker()
        return loading is not None and _is_loading(loading)

    def is_again(self, scheduler: Any, request: Any) -> bool:
        """True if another request loads the answer of P that this one carries, or has loaded it.

        So do all but the first of several answers to one prompt (``n``). Stock reads for each, the
        later ones from blocks that P gives away once it hears that the first has read them. Here
        they load nothing: D's prefix cache has the prompt once it is loaded, or D computes it. One
        without P's images cannot compute it, and reads as with stock.
        """
        state = scheduler_state(scheduler)
        if request in state.of(PlannedLoads):  # asked in each step until there are blocks for it
            return False
        taker = self._taker(request, request.kv_transfer_params)
        # D's cache may lack a block with an image.
        if taker is request or lacks_images(scheduler, request):
            return False
        is_loading = _leave(scheduler, request, taker)
        has_cache = scheduler.vllm_config.cache_config.enable_prefix_caching
        state.book.add(PROMPTS, 1, Prompt.AGAIN.value)
        if is_loading and has_cache and state.facts.can_answer_later:
            self._waiting[request] = ref(taker)
        return True

    def plan(self, scheduler: Any, request: Any, computed: int, count: int) -> int:
        """Returns how many of `count` tokens behind the `computed` ones a request loads."""
        state, params = scheduler_state(scheduler), request.kv_transfer_params
        planned = state.of(PlannedLoads)
        if request not in planned:
            load, kind = _found(scheduler, request, computed + count, state.facts)
            if absent_images(scheduler, request) > max(load.tokens, computed):
                load = load._replace(tokens=computed + count)
                state.of(FailingLoads).add(request)
            elif self._is_unfilled(scheduler, request):
                load, kind = load._replace(tokens=0), Prompt.UNFILLED
            planned[request] = load
            state.book.add(PROMPTS, 1, kind.value)
            engine_id = str(params.get("remote_engine_id"))
            key, sentence = f"{kind.value} {engine_id}", _SENTENCES.get(kind)
            if sentence is not None and key not in self.told:
                self.told[key] = True
                _LOG.warning("a prompt from engine %.200s %s", one_line(engine_id), sentence)
        return max(0, planned[request].tokens - computed)

    def _is_unfilled(self, scheduler: Any, request: Any) -> bool:
        """True if another connector may store what P fills in part, and D can compute it."""
        can_compute = self.has_company and not lacks_images(scheduler, request)
        return can_compute and fills_in_part(scheduler, request)

    def _taker(self, request: Any, params: Mapping[str, Any]) -> Any:
        """Returns the first request with this answer of P; None if that one is over.

        <= 0.12 an answer of a stock P has no name: one with the same blocks may be another. Each
        is loaded, as by stock: there P hears of no read for several answers to one prompt (``n``).
        """
        if not (params.get("remote_request_id") or params.get(HOLD)):
            return request
        known = self._takers.setdefault(_answer(params), ref(request))
        return known()

    def note_unneeded(self, request: Any) -> None:
        """Takes note of a request that has all of P's answer: the release tells P that it was read.

        A retry finds the answer taken, though the prefix cache may have let go of it by then.
        """
        params = request.kv_transfer_params or {}
        is_new = request not in self._unneeded
        if is_new and params.get("remote_block_ids") and not params.get("_remote_blocks_processed"):
            self._unneeded.add(request)
            self._taker(request, params)

    def may_be_pushed(self, scheduler: Any, request: Any, end: int) -> bool:
        """True unless P states another prompt, which it would write over D's blocks all the same.

        It pairs both lists from their ends.

        Args:
            end: tokens that D would have once P has written.
        """
        if self._pushable.get(request) == end:
            return True
        state, stated = scheduler_state(scheduler), read_prompt(request.kv_transfer_params)
        named, absent = names_images(scheduler), absent_images(scheduler, request)
        common = None
        if stated is not None:
            common = stated.common_tokens(request, names_images=named, absent=absent)
        if stated is None or common is None:
            return True
        size = 1 if is_of_whole_prompt(scheduler, state.facts) else int(scheduler.block_size)
        if common >= end and -(-stated.tokens // size) == -(-end // size):
            self._pushable[request] = end
            return True
        state.book.add(PROMPTS, 1, Prompt.PART.value)
        leave_unread(scheduler, request, state.facts)
        return False

    def give_up(self, scheduler: Any, request: Any) -> None:
        """Takes note of a request that ends in the queue: the release tells P that it was read.

        It must not where another request loads the same answer, or has loaded it. A retry finds
        the answer taken: P has given the blocks away.
        """
        taker = self._taker(request, request.kv_transfer_params)
        if taker is not request:
            _leave(scheduler, request, taker)

    def forget_unread(self, request: Any) -> None:
        """Lets a retry load what an aborted request was to read back: D has not heard of a read."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and not params.get("_remote_blocks_processed"):
            self._forget(request)

    def forget_failed(self, scheduler: Any, request: Any) -> None:
        """Lets a retry load what a request could not: P has not heard of a read, and keeps it.

        Of several ranks one may have told P: then P's word has to say whether it keeps it.
        """
        params = request.kv_transfer_params or {}
        ours = int(scheduler.vllm_config.parallel_config.world_size)
        if params.get(HOLD) or max(ours, int(params.get("tp_size") or 1)) == 1:
            self._forget(request)

    def _forget(self, request: Any) -> None:
        answer = _answer(request.kv_transfer_params or {})
        known = self._takers.get(answer)
        if known is not None and known() is request:
            del self._takers[answer]


def _answer(params: Mapping[str, Any]) -> str:
    return str(hash(repr([params.get(name) for name in _NAMES])))


def _is_loading(request: Any) -> bool:
    """True until a request's load is over; it may not have got its blocks yet."""
    is_queued = request.kv_transfer_params.get("do_remote_prefill") and not request.is_finished()
    return bool(is_queued) or request.status.name == "WAITING_FOR_REMOTE_KVS"


def _leave(scheduler: Any, request: Any, taker: Any) -> bool:
    """Leaves a request unread that has a taker's answer; returns True if that one still loads."""
    is_loading = taker is not None and _is_loading(taker)
    leave_unread(scheduler, request, scheduler_state(scheduler).facts, is_loading=is_loading)
    return is_loading


def _found(
    scheduler: Any, request: Any, end: int, facts: ReleaseFacts
) -> tuple[PlannedLoad, Prompt]:
    """Returns what a request loads of the first ``end`` tokens of its prompt."""
    params = request.kv_transfer_params
    stated, held = read_prompt(params), stated_tokens(params)
    common = None
    if stated is not None:
        named, absent = names_images(scheduler), absent_images(scheduler, request)
        common = stated.common_tokens(request, names_images=named, absent=absent)
        # D's count: its lists and its state go on behind the tokens where its steps are ahead.
        held = held or stated.tokens
    if common is None and settings.requires_tokens():
        return PlannedLoad(0, held or end), Prompt.REFUSED
    if held is None:
        same, held = _held_of_longer(scheduler, params, end, facts)
    else:
        same = min(held, end)
    same = min(same, _in_front_of_gap(scheduler, params, held, facts))
    if stated is not None:
        same = min(same, stated.tokens)
    kind = Prompt.UNSTATED
    if common is not None:
        kind = Prompt.SAME if common >= same else Prompt.PART
        same = min(common, same)
    tokens = _usable(scheduler, request, PlannedLoad(same, held), end, facts)
    if stated is not None and _leaves_last(scheduler, request, tokens, facts):
        tokens -= 1
    return PlannedLoad(tokens, held), kind


def _held_of_longer(
    scheduler: Any, params: Mapping[str, Any], end: int, facts: ReleaseFacts
) -> PlannedLoad:
    """Returns what P surely holds, and what at most, where it names blocks and states no count.

    Its last block may be partly empty, which shows only where the prompt goes on behind it, and
    where its blocks are known to be as large as D's. So may be the slots for the tokens that P
    drafts: as many as D drafts, since a draft model has caches of its own on both sides.
    """
    peers = scheduler_state(scheduler).equal_peers
    block_tokens = counted_block_tokens(scheduler, facts)
    engine_id = str(params.get("remote_engine_id"))
    named = _counted_blocks(scheduler, params, facts)
    if named is None or not peers.knows(engine_id):
        return PlannedLoad(end, end)
    alone = window_alone(scheduler) if facts.has_cache_groups else None
    blocks, window = len(named), alone[1] if alone else 0
    # Of windows alone P names the end of its list: so many blocks may be of any longer prompt.
    is_end = window > 0 and blocks > -(-window // block_tokens)
    if is_end or blocks * block_tokens >= end:
        return PlannedLoad(end, end)
    can_fail = facts.failed_loads != "unknown"  # as it does where such a P is an equal one
    if can_fail and peers.doubt(engine_id, blocks, end, block_tokens):
        return PlannedLoad(end, end)
    sure = (blocks - 1) * block_tokens - drafted_tokens(scheduler.vllm_config)
    return PlannedLoad(max(0, sure), blocks * block_tokens)


def _counted_blocks(
    scheduler: Any, params: Mapping[str, Any], facts: ReleaseFacts
) -> tuple[int, ...] | None:
    """Returns P's blocks of the group that tells how many tokens one has; None without one."""
    number, named = counted_group(scheduler, facts), groups(params.get("remote_block_ids") or ())
    return None if number is None or number >= len(named) else named[number]


def _in_front_of_gap(
    scheduler: Any, params: Mapping[str, Any], held: int, facts: ReleaseFacts
) -> int:
    """Returns how many of the held tokens lie in front of the first block that P has let go of.

    Layers with reference sliding windows (R-SWA, from 0.25) keep a prompt and the end of its
    answer. P's list has the null block for what is between them, which would be read as data.
    """
    named = groups(params.get("remote_block_ids") or ())
    if not facts.has_cache_groups or not any(0 in blocks for blocks in named):
        return held
    blocks = _counted_blocks(scheduler, params, facts)
    if blocks is None or window_alone(scheduler) is not None:
        return held
    behind = blocks[1:]
    # P's blocks may be of another size. They are enough for what it holds: none is smaller. A gap
    # is behind the prompt, and no first block.
    return (1 + behind.index(0)) * held // len(blocks) if 0 in behind else held


def _usable(scheduler: Any, request: Any, load: PlannedLoad, end: int, facts: ReleaseFacts) -> int:
    """Returns how many of the tokens to load this release can go on from."""
    tokens, held = load
    if is_of_whole_prompt(scheduler, facts) and not tokens == held == end:
        return 0
    if has_state(scheduler, facts):
        # vLLM computes the last token again, on a state that has it already.
        has_last = tokens >= request.num_tokens
        # 0.24 and 0.25 cache the state behind a chunk as the one at the end of a block, which a
        # chunk that begins inside a block goes past. D's chunk is one token.
        caches_other = not facts.spares_loaded_blocks and (
            scheduler.vllm_config.cache_config.mamba_cache_mode == "align"
            and tokens % int(scheduler.block_size)
            and request.num_tokens > tokens + 1
        )
        if has_last or caches_other:
            return 0
    if tokens < held and facts.has_cache_groups:
        cuts_finer = _may_cut_finer(scheduler, request.kv_transfer_params, held, facts)
        prompt = int(request.num_tokens)
        if not still_has(scheduler, held, tokens, prompt, cuts_finer=cuts_finer):
            return 0
    ranks = context_ranks(scheduler, facts)
    if ranks > 1 and tokens < held and not facts.states_context_parallelism:
        return 0  # such lists are paired from their ends
    if tokens == end or facts.reserves_for_loads:
        return tokens
    if request.kv_transfer_params.get("do_remote_decode") and tokens >= end - 1:
        return tokens  # a turn of which the release itself loads as much, but for D's last token
    # For the blocks of what is left a request waits at the head of the queue. These releases keep
    # none back for it: loads behind it may have all, and nothing runs that would give some back.
    slots = request.num_tokens + drafted_tokens(scheduler.vllm_config)
    return tokens if fills_no_more_blocks(scheduler, facts, tokens, slots) else 0


def _leaves_last(scheduler: Any, request: Any, tokens: int, facts: ReleaseFacts) -> bool:
    """True if D loads all of a prompt but its last token, for one key that only this one looks at.

    P's kvpatch keeps that key's block (``same_prompt``). Smaller ones of P's would not fill D's,
    which some releases read all the same; and what slots for drafted tokens push out of a list is
    not known (<= 0.24).
    """
    params = request.kv_transfer_params
    # P states this count from 0.21 on. An earlier one may have let go of the block.
    if not tokens == stated_tokens(params) == request.num_tokens:
        return False
    if facts.lists_drafted_blocks and drafted_tokens(scheduler.vllm_config):
        return False
    return (
        begins_behind_window(scheduler, tokens)
        and context_ranks(scheduler, facts) == 1
        and not _names_more_blocks(scheduler, params, tokens, facts)
    )


def _may_cut_finer(
    scheduler: Any, params: Mapping[str, Any], held: int, facts: ReleaseFacts
) -> bool:
    """True if P's blocks are smaller than D's, or may be.

    P's list of a short window alone may be as long as D's where its blocks are smaller.
    """
    alone = window_alone(scheduler)
    is_short = alone is not None and 0 < alone[1] <= 3 * counted_block_tokens(scheduler, facts)
    return is_short or _names_more_blocks(scheduler, params, held, facts)


def _names_more_blocks(
    scheduler: Any, params: Mapping[str, Any], held: int, facts: ReleaseFacts
) -> bool:
    """True if P names more blocks than D has for as many tokens: its blocks are smaller."""
    named = _counted_blocks(scheduler, params, facts)
    if named is None:
        return False
    drafted, block_tokens = (
        drafted_tokens(scheduler.vllm_config),
        counted_block_tokens(scheduler, facts),
    )
    slots, alone = held + drafted, window_alone(scheduler)
    if alone is not None and alone[1]:  # the end of its list alone
        slots = min(slots, alone[1] + block_tokens + drafted)
    return len(named) > -(-slots // block_tokens)


def fills_in_part(scheduler: Any, request: Any) -> bool:
    """True if P's blocks are smaller: the first of a window may begin inside one of D's."""
    params, facts = request.kv_transfer_params or {}, scheduler_state(scheduler).facts
    if not params.get("remote_block_ids") or not facts.has_cache_groups:
        return False
    held = stated_tokens(params) or prefilled_tokens(scheduler, request, facts)
    return has_windows(scheduler.kv_cache_config, held) and _names_more_blocks(
        scheduler, params, held, facts
    )


# --- context parallelism, which no handshake states <= 0.28 ------------------------------
#
# With it a block of D's holds several times the tokens. A P without it names more blocks, and the
# release loads the last of them.


def context_ranks(scheduler: Any, facts: ReleaseFacts) -> int:
    """Returns how many of this engine's ranks share out the tokens of a block."""
    parallel = scheduler.vllm_config.parallel_config
    return prod(int(getattr(parallel, name)) for name in facts.context_sizes)


def may_load(scheduler: Any, request: Any, facts: ReleaseFacts) -> bool:
    """True if only a P with D's own sizes can have named the blocks of a request.

    Always true from 0.29 on, where handshakes state the sizes and the release pairs unlike ones.
    A prompt that fits into one of D's blocks may have one block at any P: D computes it.
    """
    ranks = context_ranks(scheduler, facts)
    parameters = request.kv_transfer_params or {}
    if facts.states_context_parallelism or ranks == 1 or not parameters.get("remote_block_ids"):
        return True
    held = stated_tokens(parameters) or prefilled_tokens(scheduler, request, facts)
    blocks = -(-held // (int(scheduler.block_size) * ranks))
    found = {len(group) for group in groups(parameters["remote_block_ids"])}
    told = scheduler_state(scheduler).of(PromptLoads).told
    key = f"contexts {parameters['remote_engine_id']}"
    if found != {blocks} and key not in told:
        told[key] = True
        _ENGINES_LOG.warning(
            "the prompt of request %s is computed here: P names %s blocks of %d tokens, and with "
            "context parallelism as here (%d) they would be %d: use one "
            "--decode-context-parallel-size and one --block-size on both sides",
            *(shown(request.request_id), sorted(found), held, ranks, blocks),
        )
    return blocks > 1 and found == {blocks}
