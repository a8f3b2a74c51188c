"""D loads what P holds of D's own prompt, and computes the rest.

Why:
    The connector takes for granted that P and D were sent one prompt. They were not where a proxy
    appends P's first token, where templates differ by side, where a client strips or edits the
    history before it sends the next turn. Stock pairs P's and D's blocks from the ends of their
    lists: prompts of unlike lengths end D's engine, or get another prompt's keys and values, with
    HTTP 200. Prompts of one length that differ in a token get them always. The blocks enter D's
    prefix cache under the hash of D's own tokens, so that later requests get wrong answers too.
    An answer of P's that two requests carry (a retry, a router that hedges, several answers by
    ``n``) is read twice, though P gives the blocks away after the first.
Where:
    The schedulers of P and D. On D alone counts of tokens are compared; with kvpatch on P the
    tokens themselves are.
How:
    P's answer states the number of tokens that it holds, and hashes over them at 64 places at most
    (``kvpatch_prompt``, one text of 0.5 KB). D finds the last place where its own prompt has the
    same hash, loads up to there, and has vLLM compute the rest. A model with recurrent state loads
    all or nothing (0.24 to 0.26 its prefix hit is what all of its layers have: vLLM goes by the
    longest), and one with sliding windows nothing that P may have let go of. Of an answer whose
    steps had drafts only workers know the block with its state: none is loaded. Stock lets go of a
    block too many on both sides where the first key that the prompt's last token looks at ends it:
    it counts on the token behind, and D computes the last one again. P keeps it (from 0.21), and D
    loads one token less, for which vLLM has that block. 0.18 to 0.23 it gives a cache group's loads
    blocks of a later group's prefix hit (vLLM #33775): D holds the hits of all groups first.
    Where P's smaller blocks fill D's first one of a window in part, D caches it for nobody, and
    computes the prompt if it has other connectors beside, which would store it.
    A request with an answer that another one has loaded already loads nothing: the prefix cache has
    the prompt.
    A D that was sent P's tokens without P's images cannot compute them: hashes over the tokens
    alone tell it what to load, and a load of it that fails a check stays one that failed.
Upstream:
    None.
Limits:
    Without kvpatch on P nobody compares tokens: D's log says so once for each P, and
    ``KVPATCH_REQUIRE_TOKENS=true`` has such prompts computed. <= 0.20 no count is stated there
    either, and a prompt of D's that is longer by less than a block is not told from P's. <= 0.22 D
    computes a prompt of which it would load a part, unless the rest fits into the loaded blocks
    (<= 0.17 it never does): vLLM keeps no blocks back for the rest. Prompts of embeddings have no
    hashes, nor have images where vLLM numbers them: prefix caching is off, and
    ``mm_processor_cache_gb`` is 0. In push mode a prompt that P states otherwise is computed whole.
Remove when:
    The connector compares the prompts of both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvpatch.core import seams
from kvpatch.core.ledger import Patch, Site, Step, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.common_prompt import PromptLoads, fills_in_part
from kvpatch.load.prompt_hashes import FIELD, names_images, state_prompt
from kvpatch.load.read_request import held_tokens
from kvpatch.worker.envelope import answer
from kvpatch.worker.kv_cache_groups import (
    first_in_windows,
    has_drafted_states,
    has_plain_windows,
)
from kvpatch.worker.state import (
    connector_scheduler,
    connectors_of,
    held_by,
    is_push,
    nixl_connectors_of,
    scheduler_state,
    schedulers_of,
)
from kvpatch.worker.unpatched_workers import is_applied


def _get_num_new_matched_tokens(
    wrapped: Wrapped, instance: Any, request: Any, num_computed_tokens: int
) -> Any:
    count, is_async = wrapped(request, num_computed_tokens)
    scheduler = connector_scheduler(instance)
    state = scheduler_state(scheduler)
    loads = state.of(PromptLoads)
    if loads.must_wait(request):
        return None, False
    if is_push(scheduler):
        may_load = not count or loads.may_be_pushed(scheduler, request, num_computed_tokens + count)
        return (count, is_async) if may_load else (0, False)
    if not count:
        loads.note_unneeded(request)
        return count, is_async
    if loads.is_again(scheduler, request):
        return None if loads.must_wait(request) else 0, False
    # Workers must pair the blocks of both sides by token.
    if state.has_stock_workers or not is_applied("unlike_engines"):
        return count, is_async
    tokens = loads.plan(scheduler, request, num_computed_tokens, count)
    return tokens, bool(tokens) and is_async


def _answer(connector: Any, request: Any, _: Any) -> Callable[[Any], Any]:
    scheduler = connector_scheduler(connector)
    loads = scheduler_state(scheduler).of(PromptLoads)
    is_queued = bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
    if is_queued and not is_push(scheduler):
        loads.give_up(scheduler, request)
    elif not is_queued:
        loads.forget_unread(request)

    def amended(found: Any) -> Any:
        keeps_blocks, params = found
        # One that has answered has loaded, and P has heard of it.
        has_answered = bool(request.num_output_tokens)
        if request.status.name == "FINISHED_ERROR" and not is_queued and not has_answered:
            loads.forget_failed(scheduler, request)
        if keeps_blocks and params:
            named = names_images(scheduler)
            state = scheduler_state(scheduler)
            held = held_tokens(request, params, prompt_alone=state.is_host_buffered)
            if state.facts.loads_whole_blocks_only:  # 0.10.0 names no others
                held -= held % int(scheduler.block_size)
            if request.num_output_tokens > 1 and has_drafted_states(scheduler, state.facts):
                held -= 1  # a state is loaded where it stands behind all of them
                if params.get("do_remote_decode"):  # a turn, which P reads back by this count
                    params = {**params, "remote_num_tokens": 0}
            params = {**params, FIELD: str(state_prompt(request, held, names_images=named))}
        return keeps_blocks, params

    return amended


def _longest_hit_of_each_group(
    _: Wrapped, instance: Any, block_hashes: Any, max_cache_hit_length: int
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Returns the hit that all groups have. What is computed goes on from the longest one's end.

    A load brings the state behind it; a prompt that is computed, plain ones too, went on from no
    state. 0.27 looks again where nothing is loaded, which only its scheduler knows.
    """
    blocks, tokens, *_more = instance.find_longest_cache_hit(block_hashes, max_cache_hit_length)
    return blocks, (tokens,) * len(blocks)


def _hold_all_hits(
    wrapped: Wrapped,
    instance: Any,
    request_id: str,
    new_computed_blocks: tuple[Any, ...],
    num_local_computed_tokens: int,
    num_external_computed_tokens: int,
) -> Any:
    """Holds the prefix hits of all cache groups while the groups get blocks for loaded tokens.

    A group holds its own hit alone before it takes blocks, the next to be evicted: these may be a
    later group's hit. There are enough others: the release counts what is free of all hits in what
    it needs. Blocks in front of a group's window it neither counts nor holds.
    """
    counts = (num_local_computed_tokens, num_external_computed_tokens)
    groups = instance.single_type_managers
    if len(groups) == 1 or not num_external_computed_tokens:
        return wrapped(request_id, new_computed_blocks, *counts)
    held: list[Any] = []
    for group, hit in zip(groups, new_computed_blocks, strict=False):
        unseen = max(0, group.get_num_skipped_tokens(sum(counts)) // group.block_size)
        held += (block for block in hit[unseen:] if not block.ref_cnt and not block.is_null)
    instance.block_pool.touch(held)
    try:
        return wrapped(request_id, new_computed_blocks, *counts)
    finally:
        instance.block_pool.free_blocks(held)


def _add_request(wrapped: Wrapped, instance: Any, request: Any) -> Any:
    """Tells the connector's scheduler whether it has others beside it."""
    if request.kv_transfer_params and len(list(connectors_of(instance))) > 1:
        for connector in nixl_connectors_of(instance):
            scheduler_state(connector.connector_scheduler).of(PromptLoads).has_company = True
    return wrapped(request)


def _cache_whole_blocks(wrapped: Wrapped, instance: Any, request: Any) -> Any:
    """Takes the first block of a window out of D's prefix cache, if P's smaller ones fill a part.

    P has let go of the tokens in front. Nothing of this request looks at them, but a later one
    might, whose prefix hit ends earlier.
    """
    planning = [one for one in schedulers_of(instance) if held_by(one, PromptLoads)]
    if not any(fills_in_part(one, request) for one in planning):
        return wrapped(request)
    firsts = [
        (group.block_pool, block.block_id)
        for group, block in first_in_windows(instance.kv_cache_manager, request.request_id)
        if block.block_hash is None  # else D's own
    ]
    found = wrapped(request)
    for pool, block in firsts:
        pool.evict_blocks({block})
    return found


def _keep_first_key(
    names: tuple[str, ...],
    wrapped: Wrapped,
    instance: Any,
    request_id: str,
    *counts: int,
    **named: int,
) -> Any:
    """Keeps a request's block with the first key that its last token looks at: D computes that.

    The release counts on the token behind it.

    Args:
        names: of the counts, the first of which is that of computed tokens.
    """
    told = dict(zip(names, counts, strict=False)) | named
    if has_plain_windows(instance.kv_cache_config):
        told[names[0]] -= 1
    return wrapped(request_id, **told)


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    found: dict[Site, Wrapper | Step] = {
        seams.get_num_new_matched_tokens(facts): _get_num_new_matched_tokens,
        **dict.fromkeys(seams.request_finished(facts), Step(answer, _answer)),
    }
    if facts.window_end and "remote_num_tokens" in facts.answer:
        found[seams.remove_skipped_blocks(facts)] = partial(_keep_first_key, facts.window_end)
    if facts.has_cache_groups:
        found[seams.update_waiting_for_remote_kv(facts)] = _cache_whole_blocks
        found[seams.add_request(facts)] = _add_request
    if facts.allocates_before_holding:
        found[seams.allocate_new_computed_blocks(facts)] = _hold_all_hits
    if facts.takes_longest_hit:
        found[seams.longest_hit_of_each_group(facts)] = _longest_hit_of_each_group
    return found


PATCH = Patch(slug="same_prompt", wire_affecting=False, sites=_sites, document=__doc__)
