"""Requests that carry one answer of P: which of them loads it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.load import common_prompt
from kvpatch.load.common_prompt import PromptLoads, _held_of_longer, _in_front_of_gap
from kvpatch.load.prompt_hashes import FIELD, state_prompt
from kvpatch.load.read_request import HOLD, FailingLoads, PlannedLoads
from kvpatch.worker.state import scheduler_state

from .test_prompt_hashes import _image
from .test_prompt_hashes import _request as _prefilled


class _Request:
    """Fake: vLLM's, before it has got its blocks."""

    def __init__(self, number: int = 1) -> None:
        self.request_id = f"{number}_name"
        self.kv_transfer_params: dict[str, Any] = {
            "do_remote_prefill": True,
            "remote_request_id": "name",
            "remote_block_ids": [1, 2],
        }
        self.status = SimpleNamespace(name="WAITING")
        self.mm_features: list[Any] = []
        self.lora_request = None
        self.is_over = False

    def is_finished(self) -> bool:
        return self.is_over

    def end(self, status: str) -> None:
        self.kv_transfer_params["do_remote_prefill"] = False
        self.status = SimpleNamespace(name=status)
        self.is_over = True


def _scheduler(release: str = "0.21.0", *, caches: bool = True, ranks: int = 1) -> Any:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caches),
        parallel_config=SimpleNamespace(
            world_size=ranks, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
    )
    found = SimpleNamespace(
        vllm_config=config, block_size=16, is_bidirectional_kv_xfer_enabled=False
    )
    vars(scheduler_state(found))["facts"] = FACTS[release]
    return found


@pytest.mark.parametrize(
    ("release", "caches", "waits"),
    [("0.21.0", True, True), ("0.10.1", True, False), ("0.21.0", False, False)],
)
def test_the_second_waits_where_it_will_find_the_prompt(
    release: str, caches: bool, waits: bool
) -> None:
    loads, scheduler = PromptLoads(), _scheduler(release, caches=caches)
    first, second = _Request(0), _Request(1)
    assert not loads.is_again(scheduler, first)
    assert loads.is_again(scheduler, second)
    assert not second.kv_transfer_params["do_remote_prefill"]
    assert loads.must_wait(second) == waits
    first.end("FINISHED_STOPPED")
    assert not loads.must_wait(second)


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("common", [40, 16])
def test_a_second_one_without_images_loads_too(common: int, caches: bool) -> None:  # noqa: FBT001
    """Stock reads for each of several answers (``n``).

    It cannot compute the prompt, nor the end of one whose other blocks D's prefix cache has. It can
    where it has in common with P what is in front of P's image.
    """
    loads, scheduler = PromptLoads(), _scheduler(caches=caches)
    first, second = _Request(0), _Request(1)
    tokens = list(range(40))
    stated = state_prompt(_prefilled(tokens, images=(_image(20, "cat"),)), 40, names_images=True)
    for request in (first, second):
        request.kv_transfer_params[FIELD] = str(stated)
        vars(request).update(prompt_token_ids=[*tokens[:common], *range(100, 140)])
    assert not loads.is_again(scheduler, first)
    assert loads.is_again(scheduler, second) == (common == 16)
    assert loads.must_wait(second) == (common == 16 and caches)


def _bare(name: str, at_p: list[int] | None, own: list[int]) -> _Request:
    """A request of D's with the size of an image at 20 alone. P had it; None: P states nothing."""
    request = _Request()
    bare = _image(20, name, ("image_grid_thw",))
    vars(request).update(prompt_token_ids=own, num_tokens=len(own), mm_features=[bare])
    request.kv_transfer_params["remote_num_tokens"] = 64 if at_p is None else len(at_p)
    if at_p is not None:
        filled = _prefilled(at_p, images=(_image(20, "cat"),))
        stated = state_prompt(filled, len(at_p), names_images=True)
        request.kv_transfer_params[FIELD] = str(stated)
    return request


@pytest.fixture
def consumer() -> Any:
    """A scheduler of D's, of a release that takes an image's size alone."""
    scheduler = _scheduler("0.28.0")
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
    return scheduler


@pytest.mark.parametrize("is_stated", [True, False])
@pytest.mark.parametrize("name", ["cat", "hash of the metadata"])
def test_who_has_an_images_size_alone_loads_the_prompt_each_time(
    name: str,
    is_stated: bool,  # noqa: FBT001
    consumer: Any,
) -> None:
    """What computes the image ends the engine."""
    loads, tokens = PromptLoads(), list(range(64))
    for _ in range(3):  # a retry, several answers
        request = _bare(name, tokens if is_stated else None, tokens)
        assert not loads.is_again(consumer, request)
        assert not loads.must_wait(request)
        assert loads.plan(consumer, request, 0, 64) == 64
        assert request not in scheduler_state(consumer).of(FailingLoads)


@pytest.mark.parametrize(
    ("differs", "hit", "loaded", "fails"),
    [
        (40, 0, 32, False),
        (20, 0, 64, True),
        (20, 16, 48, True),
        (20, 32, 0, False),  # D's prefix cache has it
        (0, 0, 64, True),
    ],
)
def test_an_image_that_can_be_neither_loaded_nor_computed_fails_its_request(
    differs: int,
    hit: int,
    loaded: int,
    fails: bool,  # noqa: FBT001
    consumer: Any,
) -> None:
    """Prompts differ in front of its end: stock answers wrongly, and what computes it ends D."""
    tokens = list(range(64))
    request = _bare("cat", [*tokens[:differs], 99, *tokens[differs + 1 :]], tokens)
    assert PromptLoads().plan(consumer, request, hit, 64 - hit) == loaded
    assert (request in scheduler_state(consumer).of(FailingLoads)) == fails


@pytest.mark.parametrize(("has_images", "loaded"), [(False, 64), (True, 0)])
def test_who_has_none_of_the_images_loads_beside_a_connector_that_stores(
    has_images: bool,  # noqa: FBT001
    loaded: int,
    consumer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P's smaller blocks fill a window's first one in part. Computed, it would be of no image."""
    monkeypatch.setattr(common_prompt, "fills_in_part", lambda *_: True)
    loads, tokens = PromptLoads(has_company=True), list(range(64))
    request = _bare("cat", tokens, tokens)
    request.mm_features = [_image(20, "cat")] if has_images else []
    assert loads.plan(consumer, request, 0, 64) == loaded
    assert request not in scheduler_state(consumer).of(FailingLoads)


def test_it_fails_where_prompts_without_hashes_are_computed(
    consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPATCH_REQUIRE_TOKENS", "true")
    request = _bare("cat", None, list(range(64)))
    assert PromptLoads().plan(consumer, request, 0, 64) == 64
    assert request in scheduler_state(consumer).of(FailingLoads)


def test_a_retry_loads_what_the_first_could_not() -> None:
    """A failed transfer is answered HTTP 500, and P keeps the blocks: so does stock load them."""
    loads, scheduler = PromptLoads(), _scheduler()
    first, other, retry, late = (_Request(number) for number in range(4))
    assert not loads.is_again(scheduler, first)
    assert loads.is_again(scheduler, other)
    first.end("FINISHED_ERROR")
    loads.forget_failed(scheduler, other)
    assert loads.is_again(scheduler, _Request(9)), "of another request"
    loads.forget_failed(scheduler, first)
    assert not loads.is_again(scheduler, retry)
    assert loads.is_again(scheduler, late)


@pytest.mark.parametrize("is_over", [False, True], ids=["given up", "read"])
def test_a_retry_reads_back_what_the_first_did_not(is_over: bool) -> None:  # noqa: FBT001
    """A P that gives up a turn before it has blocks for it tells D nothing, which keeps its own."""
    loads, scheduler = PromptLoads(), _scheduler()
    first, other, retry = (_Request(number) for number in range(3))
    for request in (first, other, retry):
        request.kv_transfer_params |= {"do_remote_prefill": False, "do_remote_decode": True}
    assert not loads.is_again(scheduler, first)
    assert loads.is_again(scheduler, other)
    loads.forget_unread(other)
    if is_over:
        first.kv_transfer_params["_remote_blocks_processed"] = True
    loads.forget_unread(first)
    assert loads.is_again(scheduler, retry) == is_over


@pytest.mark.parametrize("hold", ["", "1/2"])
def test_of_several_ranks_one_may_have_told_p(hold: str) -> None:
    """A P that grants holds says itself whether it keeps the blocks."""
    loads, scheduler = PromptLoads(), _scheduler(ranks=2)
    first, retry = _Request(0), _Request(1)
    for request in (first, retry):
        request.kv_transfer_params |= {HOLD: hold} if hold else {}
    assert not loads.is_again(scheduler, first)
    first.end("FINISHED_ERROR")
    loads.forget_failed(scheduler, first)
    assert loads.is_again(scheduler, retry) is not bool(hold)


def test_what_a_full_prefix_hit_needed_nothing_of_is_gone() -> None:
    """The release tells P that it was read, so that a retry finds the answer taken."""
    loads, scheduler = PromptLoads(), _scheduler()
    first, retry = _Request(0), _Request(1)
    loads.note_unneeded(first)
    first.end("FINISHED_STOPPED")
    assert loads.is_again(scheduler, retry)


def test_what_waits_for_a_load_that_fails_keeps_no_retry_from_it() -> None:
    loads, scheduler = PromptLoads(), _scheduler()
    first, second, retry = (_Request(number) for number in range(3))
    assert not loads.is_again(scheduler, first)
    assert loads.is_again(scheduler, second)
    first.end("FINISHED_ERROR")
    loads.forget_failed(scheduler, first)
    loads.note_unneeded(second)
    assert not loads.is_again(scheduler, retry)


def test_answers_without_a_name_are_each_their_own() -> None:
    """<= 0.12; P hears of no read under the names of several answers, and keeps the blocks."""
    loads, scheduler = PromptLoads(), _scheduler("0.12.0")
    for number in range(2):
        request = _Request(number)
        del request.kv_transfer_params["remote_request_id"]
        assert not loads.is_again(scheduler, request)


@pytest.mark.parametrize(("method", "sure"), [(None, 32), ("ngram", 32), ("eagle", 28)])
def test_slots_for_drafted_tokens_hold_none_of_the_prompt(method: str | None, sure: int) -> None:
    """A stock P of 31 tokens names three blocks of 16 where it drafts four (<= 0.20)."""
    scheduler = _scheduler("0.14.1")
    scheduler.vllm_config.speculative_config = (
        None if method is None else SimpleNamespace(method=method, num_speculative_tokens=4)
    )
    assert scheduler_state(scheduler).equal_peers.learn("P", 2, 2)
    answer = {"remote_engine_id": "P", "remote_block_ids": [5, 3, 8]}
    assert _held_of_longer(scheduler, answer, 60, FACTS["0.14.1"]) == (sure, 48)


@pytest.mark.parametrize(("blocks_of", "whole"), [(32, True), (16, False)])
def test_a_p_of_larger_blocks_is_not_taken_for_an_equal_one_for_good(
    blocks_of: int, whole: bool
) -> None:
    """It was, by a trimmed prompt; of an equal one, whose prompts are shorter, a part is loaded."""
    scheduler, facts = _scheduler("0.14.1"), FACTS["0.14.1"]
    scheduler.vllm_config.speculative_config = None
    peers = scheduler_state(scheduler).equal_peers
    assert peers.learn("P", 4, 4)
    for tokens in (100, 150, 200, 250):
        shorter = 0 if blocks_of == 32 else 40
        count = -(-(tokens - shorter) // blocks_of)
        answer = {"remote_engine_id": "P", "remote_block_ids": list(range(count))}
        found = _held_of_longer(scheduler, answer, tokens, facts)
        peers.learn("P", count, -(-found.remote_tokens // 16))  # as the scheduler sends the load
    assert (found.tokens == tokens) == whole


@pytest.mark.parametrize("stated", ["134", 134.0, "many", None, 0, -1])
def test_a_count_that_is_none_ends_no_engine(stated: object) -> None:
    """As it comes where the patch transfer_params is off; stock looks at none for such a load."""
    scheduler = _scheduler()
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=())
    request = _Request()
    request.kv_transfer_params |= {"remote_engine_id": "P", "remote_num_tokens": stated}
    request.num_tokens = 137
    assert PromptLoads().plan(scheduler, request, 0, 137) == 137


class FullAttentionSpec(SimpleNamespace):
    """Fake: vLLM's, by its name."""


class SlidingWindowSpec(SimpleNamespace):
    """Fake: vLLM's, by its name."""


class MambaSpec(SimpleNamespace):
    """Fake: vLLM's, by its name."""


@pytest.mark.parametrize(
    ("kind", "prompt", "loaded"),
    [
        (FullAttentionSpec, 175, 144),
        (FullAttentionSpec, 96, 96),
        (SlidingWindowSpec, 175, 0),
        (MambaSpec, 175, 0),
        (MambaSpec, 144, 0),
        (partial(FullAttentionSpec, non_causal=True), 175, 0),
    ],
)
def test_a_peer_whose_steps_are_ahead_of_its_answer(kind: Any, prompt: int, loaded: int) -> None:
    """Its count, lists and state go on behind the tokens that it states (an answer that stops)."""
    ids = list(range(1, 300))
    request = _Request()
    vars(request).update(prompt_token_ids=ids[:prompt], num_tokens=prompt)
    stated = state_prompt(_prefilled(ids[:133], tuple(ids[133:145])), 145, names_images=True)
    request.kv_transfer_params |= {"remote_num_tokens": 145, FIELD: str(stated)}
    scheduler = _scheduler("0.33.0")
    scheduler._is_hma_required = True
    group = SimpleNamespace(kv_cache_spec=kind(sliding_window=40, block_size=16))
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])

    assert PromptLoads().plan(scheduler, request, 0, min(145, prompt)) == loaded
    assert scheduler_state(scheduler).of(PlannedLoads)[request].remote_tokens == 145


class SlidingWindowMLASpec(SimpleNamespace):
    """Fake: vLLM's, by its name."""


@pytest.mark.parametrize(
    ("prompt", "loaded", "changes"),
    [
        (135, 134, {}),
        (136, 136, {}),
        (39, 39, {}),  # no token is in front of the window
        (129, 129, {"window": 18}),  # the last token begins a block
        (135, 0, {"held": 136}),  # P has let go of it
        (135, 135, {"is_stated": False}),
        (135, 135, {"named": 8}),  # P's blocks are smaller
        (135, 135, {"kind": SlidingWindowMLASpec}),
        (135, 135, {"release": "0.24.0", "drafts": True}),
        (135, 134, {"release": "0.25.0", "drafts": True}),
    ],
)
def test_a_window_whose_first_key_ends_a_block(
    prompt: int, loaded: int, changes: dict[str, Any]
) -> None:
    """Of all but the prompt's last token vLLM has the block that this one looks at."""
    ids, held = list(range(1, 300)), changes.get("held", prompt)
    request = _Request()
    vars(request).update(prompt_token_ids=ids[:prompt], num_tokens=prompt)
    params = {"remote_num_tokens": held, "remote_engine_id": "P"}
    params["remote_block_ids"] = [list(range(1, 1 + changes.get("named", 4)))]
    if changes.get("is_stated", True):
        filled = _prefilled(ids[:prompt], tuple(ids[prompt:]))
        params[FIELD] = str(state_prompt(filled, held, names_images=True))
    request.kv_transfer_params |= params
    scheduler = _scheduler(changes.get("release", "0.33.0"))
    scheduler._is_hma_required = True
    if "drafts" in changes:
        drafting = SimpleNamespace(method="eagle", num_speculative_tokens=4)
        scheduler.vllm_config.speculative_config = drafting
    kind = changes.get("kind", SlidingWindowSpec)
    spec = kind(sliding_window=changes.get("window", 40), block_size=16)
    scheduler.kv_cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]
    )

    assert PromptLoads().plan(scheduler, request, 0, prompt) == loaded


@pytest.mark.parametrize(("named", "loaded"), [([0, 1, 2, 3], 64), ([5, 6, 0, 8], 32)])
def test_a_gap_is_behind_the_first_block(
    named: list[int], loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own tests name block 0 first, which no P gives to a request."""
    monkeypatch.setattr(common_prompt, "counted_group", lambda *_: 0)
    monkeypatch.setattr(common_prompt, "window_alone", lambda _: None)
    scheduler = _scheduler("0.33.0")
    assert _in_front_of_gap(scheduler, {"remote_block_ids": named}, 64, FACTS["0.33.0"]) == loaded


def test_a_window_names_the_null_block_where_no_scheduler_knows_its_groups() -> None:
    """<= 0.17, of a model whose layers all have windows."""
    request, scheduler = _Request(), _scheduler("0.17.1")
    request.num_tokens = 64
    request.kv_transfer_params |= {"remote_block_ids": [0, 0, 7, 8], "remote_engine_id": "P"}
    assert PromptLoads().plan(scheduler, request, 0, 64) == 64


@pytest.mark.parametrize(
    ("prompt", "held", "edit", "loads"),
    [
        (133, 133, None, True),
        (130, 133, None, False),  # no hash of P's covers the last of them
        (133, 134, None, False),
        (134, 133, None, False),
        (133, 200, None, False),
        (133, 133, 70, False),
        (133, 133, 132, False),
    ],
)
def test_what_p_pushes_is_the_prompt(prompt: int, held: int, edit: int | None, loads: bool) -> None:
    """P writes all of its blocks to the end of D's list, whatever D was sent."""
    ids = list(range(1, 300))
    own = ids[:prompt]
    if edit is not None:
        own[edit] = 0
    request = _Request()
    vars(request).update(prompt_token_ids=own)
    scheduler = _scheduler("0.33.0")
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
    stopped: list[str] = []
    scheduler._stop_heartbeat = stopped.append

    assert PromptLoads().may_be_pushed(scheduler, request, prompt), "P states nothing"
    request.kv_transfer_params[FIELD] = str(
        state_prompt(_prefilled(ids[:held]), held, names_images=True)
    )
    assert PromptLoads().may_be_pushed(scheduler, request, prompt) == loads
    assert request.kv_transfer_params["do_remote_prefill"] == loads
    assert (not stopped) == loads
