"""Prompts of D's that are not P's: longer, shorter, or with another token in them.

The schedulers of both sides are the release's own, and D computes what it does not load. What its
cache holds in the end is compared with its own prompt, for each token; so is what a later request
with the same prompt finds in the prefix caches of D and P.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS
from kvpatch.load.prompt_hashes import FIELD
from kvpatch.load.read_request import HOLD as FIELD_OF_HOLD

from .case import PEER_BLOCK_SIZE, PEER_LAYOUT, EngineSpec
from .engine_api import Ask, Prompt, Served
from .host import Lab
from .releases import newest
from .scheduler import TO_BE_READ
from .selection import in_turns, some_of
from .stage import Actor, Stage

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_BLOCK, _TOKENS, _BORDER = 16, 137, 128
_FINISHED = "FINISHED_LENGTH_CAPPED"
SPEC = EngineSpec(
    block_tokens=_BLOCK,
    planned_blocks=600,
    layers=2,
    kv_heads=2,
    head_dim=16,
    dtype="float32",
    own_scheduler=True,
)
MODELS = {
    "attention": {},
    "windows": {"window_tokens": (0, 40), "layers": 4},
    "states": {"has_state": True, "layers": 4},
}
_COUNT = "remote_num_tokens"
#: How much longer D's prompt is than P's.
_LENGTHS = (-67, -10, -7, -1, 0, 1, 2, 20, _BLOCK, 3 * _BLOCK)
_SOME_LENGTHS = (-10, -1, 0, 1, 20)


def _states_counts(release: str) -> bool:
    """From 0.21 on P's own answer has the number of its tokens."""
    return _COUNT in FACTS[release].answer


@dataclass(frozen=True)
class Pair:
    """P and D, acquainted."""

    stage: Stage
    prefill: Actor
    decode: Actor

    def like(self, prompt: Prompt, tokens: int = 0, edits: Sequence[int] = ()) -> Prompt:
        """Another request's prompt, which begins as this one; of as many tokens by default."""
        other = self.stage.prompt(tokens or prompt.tokens)
        return replace(other, number=prompt.number, edits=tuple(edits))

    def prefilled(self, prompt: Prompt) -> Ask:
        (served,) = self.prefill.complete(Ask(prompt, json.dumps(TO_BE_READ)))
        assert served.status == _FINISHED
        return Ask(prompt, served.answer)

    def decoded(self, prompt: Prompt, answer: str = "") -> Served:
        (served,) = self.decode.complete(Ask(prompt, answer))
        return served

    def serve(self, prompt: Prompt, answer: str = "") -> Served:
        """Has D answer a prompt, which both sides' caches hold then."""
        served = self.decoded(prompt, answer)
        assert served.status == _FINISHED
        self.assert_right(prompt)
        return served

    def seed(self, prompt: Prompt, tokens: int) -> None:
        """Has D's prefix cache hold the beginning of a prompt."""
        if tokens:
            assert self.decoded(self.like(prompt, tokens + 1)).status == _FINISHED

    def assert_right(self, prompt: Prompt) -> None:
        """D's cache holds this prompt, and so do the prefix caches of both sides."""
        wrong, total = self.decode.wrong(prompt)
        assert (wrong, total > 0) == (0, True)
        for actor in (self.decode, self.prefill):
            again = self.like(prompt, edits=prompt.edits)
            (served,) = actor.complete(Ask(again, ""))
            assert served.status == _FINISHED
            assert actor.wrong(again)[0] == 0, f"{actor.name}, from its prefix cache"


def _pair(stage: Stage, prefill: EngineSpec, decode: EngineSpec) -> Pair:
    said = ((PEER_BLOCK_SIZE, str(prefill.block_tokens)), (PEER_LAYOUT, prefill.layout))
    decode = replace(decode, settings=(*decode.settings, *said))
    actors = [stage.start(spec) for spec in (prefill, decode)]
    pair = Pair(stage, *actors)
    ask = pair.prefilled(stage.prompt(_TOKENS))
    assert pair.decoded(stage.prompt(_TOKENS), "").status == _FINISHED
    pair.decoded(ask.prompt, ask.answer)  # hands are shaken, and P is known
    return pair


def _specs(lab: Lab, kind: str, model: str = "attention") -> tuple[EngineSpec, EngineSpec]:
    """P and D, with kvpatch."""
    if model != "attention" and not FACTS[lab.release].has_cache_groups:
        pytest.skip("<= 0.17 the connector takes one cache group")
    spec = replace(SPEC, patched=True, **MODELS[model])  # type: ignore[arg-type]
    if kind == "like":
        return spec, spec
    if FACTS[lab.release].loads_whole_blocks_only:
        pytest.skip("0.10.0 states no block size")
    return replace(spec, block_tokens=2 * _BLOCK, planned_blocks=300), spec


@pytest.fixture(scope="module", params=["like", "unlike"])
def pair(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Stage(lab) as stage:
        yield _pair(stage, *_specs(lab, request.param))


@pytest.fixture(scope="module", params=["like", "unlike"])
def beside_stock(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """P is stock: it states no hashes, and <= 0.20 no count of tokens."""
    prefill, decode = _specs(lab, request.param)
    with Stage(lab) as stage:
        yield _pair(stage, replace(prefill, patched=False), decode)


@pytest.mark.parametrize(
    ("more", "tokens", "hit"), some_of(_LENGTHS, (_TOKENS, _BORDER), (0, 2 * _BLOCK))
)
def test_other_lengths(lab: Lab, pair: Pair, more: int, tokens: int, hit: int) -> None:
    """D loads what both prompts have in common, and computes the rest."""
    ask = pair.prefilled(pair.stage.prompt(tokens))
    prompt = pair.like(ask.prompt, tokens + more)
    pair.seed(prompt, hit)

    served = pair.serve(prompt, ask.answer)

    # <= 0.22 only what the loaded blocks have slots for is computed behind them.
    facts = FACTS[lab.release]
    has_slots = facts.reserves_for_loads or (facts.has_cache_groups and tokens == _TOKENS)
    if more == 0 or (more in (1, 2) and has_slots):
        assert served.computed < prompt.tokens - hit, "something is loaded"


@pytest.mark.parametrize("edit", [0, 70, _TOKENS - 1])
@pytest.mark.parametrize("more", [0, 5])
def test_another_token(pair: Pair, edit: int, more: int) -> None:
    """A prompt with another first, middle or last token gets none of P's behind it."""
    ask = pair.prefilled(pair.stage.prompt(_TOKENS))
    prompt = pair.like(ask.prompt, _TOKENS + more, [edit])

    pair.serve(prompt, ask.answer)
    pair.serve(pair.like(ask.prompt))


@pytest.mark.parametrize(("more", "hit"), in_turns(_LENGTHS, (0, 2 * _BLOCK)))
def test_other_lengths_beside_a_stock_p(
    lab: Lab, beside_stock: Pair, more: int, hit: int, request: pytest.FixtureRequest
) -> None:
    """Counts of tokens are compared. Where P states none, a few tokens more cannot be told."""
    pair = beside_stock
    ask = pair.prefilled(pair.stage.prompt(_TOKENS))
    prompt = pair.like(ask.prompt, _TOKENS + more)
    pair.seed(prompt, hit)
    fills_more = -(-prompt.tokens // pair.prefill.spec.block_tokens) > -(
        -_TOKENS // pair.prefill.spec.block_tokens
    )
    if more > 0 and not (_states_counts(lab.release) or fills_more):
        pytest.skip("docs/reference/limits.md: P's last block may be partly empty")

    served = pair.decoded(prompt, ask.answer)

    if more <= 0 or _states_counts(lab.release) or "unlike" not in request.node.name:
        assert served.status == _FINISHED
    if served.status == _FINISHED:  # else its load has failed
        pair.assert_right(prompt)


def test_p_is_told_of_a_far_shorter_prompt(lab: Lab, pair: Pair) -> None:
    """P names more blocks than D's prompt has tokens; it does not keep them for its whole lease."""
    ask = pair.prefilled(pair.stage.prompt(10 * _TOKENS))
    prompt = pair.like(ask.prompt, _BLOCK)
    if not FACTS[lab.release].names_remote_request:  # P is told by the name that D's request has
        prompt = replace(prompt, name=ask.prompt.name)

    pair.serve(prompt, ask.answer)

    assert pair.prefill.heard([ask.prompt]) == {ask.prompt.name}


def test_a_load_in_part_keeps_others_from_no_block(stage: Stage, lab: Lab) -> None:
    """<= 0.22 vLLM keeps none back for what is to be computed behind it: D stood still for good."""
    prefill, decode = _specs(lab, "like")
    pair = _pair(stage, prefill, replace(decode, planned_blocks=41))
    asks = [pair.prefilled(stage.prompt(16 * _BLOCK)) for _ in range(3)]
    asks[0] = Ask(pair.like(asks[0].prompt, edits=[5 * _BLOCK]), asks[0].answer)

    served = pair.decode.complete(*asks)

    assert [one.status for one in served] == [_FINISHED] * 3


@pytest.mark.on(has_cache_groups=True)
@pytest.mark.parametrize("windows", [(0, 75), (75,)])
def test_a_window_whose_p_has_smaller_blocks(
    stage: Stage, lab: Lab, windows: tuple[int, ...]
) -> None:
    """It has let go of more than a P with D's blocks: D plans no load that its worker refuses."""
    spec = replace(SPEC, patched=True, layers=4, window_tokens=windows)
    fails = (("KVPATCH_ON_FAILED_CHECK", "fail"),)
    decode = replace(spec, block_tokens=64, planned_blocks=200, settings=fails)
    pair = _pair(stage, spec, decode)
    ask = pair.prefilled(stage.prompt(190))

    pair.serve(pair.like(ask.prompt, 150), ask.answer)

    assert pair.prefill.heard([ask.prompt]) == {ask.prompt.name}


@pytest.mark.on(since="0.21")
@pytest.mark.parametrize("windows", [(0, 40), (40,)])
@pytest.mark.parametrize("kind", ["like", "unlike"])
def test_the_first_key_of_a_window(
    stage: Stage, lab: Lab, kind: str, windows: tuple[int, ...]
) -> None:
    """It is the last of a block. Only the prompt's last token looks at it, which D computes."""
    changes = {"layers": 4, "window_tokens": windows}
    pair = _pair(stage, *(replace(spec, **changes) for spec in _specs(lab, kind)))
    tokens = 6 * _BLOCK + 40 - 1
    for more, hit in ((0, 0), (0, 2 * _BLOCK), (0, 7 * _BLOCK), (1, 0), (-_BLOCK, 0), (20, 0)):
        ask = pair.prefilled(stage.prompt(tokens))
        prompt = pair.like(ask.prompt, tokens + more)
        pair.seed(prompt, hit)
        served = pair.serve(prompt, ask.answer)
        if not more:
            assert served.computed == 1, "the rest is loaded"


@pytest.mark.on(has_cache_groups=True)
@pytest.mark.parametrize("windows", [(0, 40), (40,)])
def test_a_shorter_prompt_looks_in_front_of_the_loaded_window(
    stage: Stage, windows: tuple[int, ...]
) -> None:
    """P's smaller blocks fill D's first one of the window in part: no other prompt may hit it."""
    spec = replace(SPEC, patched=True, layers=4, window_tokens=windows)
    pair = _pair(stage, spec, replace(spec, block_tokens=4 * _BLOCK, planned_blocks=200))
    ask = pair.prefilled(stage.prompt(148))
    assert pair.decoded(ask.prompt, ask.answer).status == _FINISHED
    shorter = pair.like(ask.prompt, 2 * 4 * _BLOCK + 1)

    assert pair.decoded(shorter, "").status == _FINISHED

    wrong, total = pair.decode.wrong(shorter)
    assert (wrong, total > 0) == (0, True)


@pytest.mark.on(has_cache_groups=True)
def test_windows_alone_whose_p_states_no_count(stage: Stage) -> None:
    """P's list is the end of a prompt's blocks, which does not tell how long the prompt is."""
    spec = replace(SPEC, layers=4, window_tokens=(4 * _BLOCK,))
    pair = _pair(stage, spec, replace(spec, patched=True))
    for tokens in (40, 100, 50, 130, 90):
        ask = pair.prefilled(stage.prompt(tokens))
        answer = {name: value for name, value in json.loads(ask.answer).items() if name != _COUNT}
        served = pair.serve(ask.prompt, json.dumps(answer))
        assert served.computed == 1, "the rest is loaded"


def test_empty_texts_of_a_typed_proxy(beside_stock: Pair) -> None:
    """A proxy whose fields are typed sends an empty text for what P did not send."""
    pair = beside_stock
    ask = pair.prefilled(pair.stage.prompt(_TOKENS))
    fields = ("kvpatch_hold", "kvpatch_prompt", "kvpatch_digest")
    answer = {**json.loads(ask.answer), **dict.fromkeys(fields, "")}
    pair.serve(ask.prompt, json.dumps(answer))


def test_a_longer_prompt_behind_a_shorter_one(stage: Stage, lab: Lab) -> None:
    """A list that is longer than D's prompt does not make a known peer an unknown one."""
    prefill, decode = _specs(lab, "like")
    pair = _pair(stage, replace(prefill, patched=False), decode)
    for more in (-20, 20):
        ask = pair.prefilled(stage.prompt(_TOKENS))
        prompt = pair.like(ask.prompt, _TOKENS + more)
        pair.serve(prompt, ask.answer)


@pytest.mark.parametrize("model", ["windows", "states"])
@pytest.mark.parametrize("kind", ["like", "unlike"])
def test_windows_and_states(stage: Stage, lab: Lab, kind: str, model: str) -> None:
    """A state is one behind all of P's tokens; a window may have let go of earlier ones."""
    pair = _pair(stage, *_specs(lab, kind, model))
    for more in _SOME_LENGTHS:
        ask = pair.prefilled(stage.prompt(_TOKENS))
        prompt = pair.like(ask.prompt, _TOKENS + more)
        served = pair.serve(prompt, ask.answer)
        if not more:
            # 0.18 leaves P's last token out of no state.
            is_loaded = model != "states" or bool(FACTS[lab.release].prefill_count)
            assert (served.computed < _TOKENS) == is_loaded
    ask = pair.prefilled(stage.prompt(_TOKENS))
    pair.serve(pair.like(ask.prompt, edits=[70]), ask.answer)


@pytest.mark.on(since="0.24")  # else: no prefix cache of states beside a connector
@pytest.mark.parametrize("edits", [[], [70]], ids=["again", "edited"])
def test_what_is_computed_behind_a_hit_without_its_state(
    stage: Stage, lab: Lab, edits: list[int]
) -> None:
    """Attention's blocks are in D's prefix cache, and the state at their end is not (0.24)."""
    prefill, decode = _specs(lab, "like", "states")
    pair = _pair(stage, replace(prefill, state_mode="align"), replace(decode, state_mode="align"))
    ask = pair.prefilled(stage.prompt(_TOKENS))
    pair.serve(ask.prompt, ask.answer)
    pair.serve(pair.like(ask.prompt, edits=edits), ask.answer)


def test_a_cache_that_kvpatch_does_not_read_into(stage: Stage, lab: Lab) -> None:
    """The release reads it, by lists that end with the tokens that are loaded."""
    if Version("0.18") <= Version(lab.release) < Version("0.24"):
        pytest.skip("stock does not register layers that share a cache")
    prefill, _ = _specs(lab, "like")
    spec = replace(prefill, sharing_layers=1)
    pair = _pair(stage, spec, spec)
    if lab.release == newest():
        assert not pair.decode.call("has_reader")
    for more, hit in product((*_SOME_LENGTHS, -7, _BLOCK), (0, 2 * _BLOCK)):
        ask = pair.prefilled(stage.prompt(_TOKENS))
        prompt = pair.like(ask.prompt, _TOKENS + more)
        pair.seed(prompt, hit)
        pair.serve(prompt, ask.answer)


@pytest.mark.parametrize("is_at_once", [False, True], ids=["later", "at once"])
def test_an_answer_that_comes_again(lab: Lab, pair: Pair, is_at_once: bool) -> None:  # noqa: FBT001
    """A retry, and several answers to a prompt: P gives the blocks away after one read."""
    ask = pair.prefilled(pair.stage.prompt(_TOKENS))
    again = Ask(pair.like(ask.prompt), ask.answer)

    if is_at_once:
        first, second = pair.decode.complete(ask, again)
    else:
        (first,), (second,) = pair.decode.complete(ask), pair.decode.complete(again)

    assert {first.status, second.status} == {_FINISHED}
    if _waits_for_first(lab, ask):
        assert second.computed <= _BLOCK, "what is behind the last whole block"
    for prompt in (ask.prompt, again.prompt):
        pair.assert_right(prompt)


def _waits_for_first(lab: Lab, ask: Ask) -> bool:
    """True if a second request with an answer of P's waits until a first one has loaded it."""
    facts = FACTS[lab.release]
    is_named = facts.names_remote_request or FIELD_OF_HOLD in ask.answer
    return facts.can_answer_later and is_named


@pytest.mark.on(grants_leases=True)  # else: <= 0.21 no lease is renewed
def test_a_second_request_renews_no_lease(stage: Stage, lab: Lab) -> None:
    """It does not read what P keeps; the first one's lease is renewed until that is loaded."""
    prefill, decode = _specs(lab, "like")
    pair = _pair(stage, prefill, replace(decode, step_tokens=48))
    ask = pair.prefilled(stage.prompt(_TOKENS))
    second, retry = pair.like(ask.prompt), pair.like(ask.prompt, edits=[0])
    assert pair.decode.call("receive", ask) == "WAITING_FOR_REMOTE_KVS"
    assert pair.decode.call("receive", Ask(second, ask.answer)) == "WAITING"
    assert pair.decode.call("renewed_leases") == [ask.prompt.name]

    assert pair.decode.call("serve", ask.prompt.name, 60.0) != "WAITING_FOR_REMOTE_KVS"
    assert pair.decode.call("renewed_leases") == []
    assert pair.decode.call("receive", Ask(retry, ask.answer)) == "RUNNING"
    assert pair.decode.call("renewed_leases") == []


@pytest.mark.parametrize("is_queued", [False, True], ids=["behind a step", "in the queue"])
def test_a_second_request_that_is_given_up(lab: Lab, pair: Pair, is_queued: bool) -> None:
    """P hears nothing of it: it would give away what the first request still reads.

    In the queue no step has seen that the first has its answer.
    """
    ask = pair.prefilled(pair.stage.prompt(_TOKENS))
    if not _waits_for_first(lab, ask):
        pytest.skip("the second one does not wait")
    second = Ask(pair.like(ask.prompt), ask.answer)
    assert pair.decode.call("receive", ask) == "WAITING_FOR_REMOTE_KVS"

    if is_queued:
        assert not pair.decode.call("give_up_in_queue", second)
    else:
        assert pair.decode.call("receive", second) == "WAITING"
        assert not pair.decode.call("is_told_of", second.prompt.name)

    assert pair.decode.call("serve", ask.prompt.name, 60.0) != "WAITING_FOR_REMOTE_KVS"
    assert pair.decode.wrong(ask.prompt)[0] == 0


@pytest.mark.on(names_remote_request=True)  # else: an answer has no name
def test_a_retry_of_what_was_given_up_in_the_queue(lab: Lab, beside_stock: Pair) -> None:
    """P was told, and has given the blocks to another request; it says nothing of it."""
    pair = beside_stock
    (ask,) = pair.prefill.compute(pair.stage.prompt(_TOKENS))
    assert pair.decode.call("give_up_in_queue", ask)
    pair.decode.call("tick")
    assert pair.prefill.heard([ask.prompt]) == {ask.prompt.name}
    pair.prefill.call("hand_on", ask.prompt.name)
    again = pair.like(ask.prompt)

    served = pair.decoded(again, ask.answer)

    assert (served.status, served.computed) == (_FINISHED, _TOKENS)
    assert pair.decode.wrong(again)[0] == 0


def test_tokens_that_must_be_shown(stage: Stage, lab: Lab) -> None:
    """With KVPATCH_REQUIRE_TOKENS a prompt without hashes is computed, and one with is loaded."""
    prefill, decode = _specs(lab, "like")
    decode = replace(decode, settings=(*decode.settings, ("KVPATCH_REQUIRE_TOKENS", "true")))
    pair = _pair(stage, prefill, decode)
    for is_passed_on in (True, False):
        ask = pair.prefilled(stage.prompt(_TOKENS))
        answer = json.loads(ask.answer)
        if not is_passed_on:
            assert answer.pop(FIELD)
        served = pair.serve(ask.prompt, json.dumps(answer))
        assert (served.computed < _TOKENS) == is_passed_on


@pytest.mark.parametrize(("more", "edits"), [(-10, []), (0, [70])])
def test_stock_takes_them_for_ps_prompt(
    stage: Stage, lab: Lab, more: int, edits: list[int]
) -> None:
    """The negative control: what is mended here, and that the test sees it."""
    prefill, decode = _specs(lab, "like")
    pair = _pair(stage, replace(prefill, patched=False), replace(decode, patched=False))
    ask = pair.prefilled(stage.prompt(_TOKENS))
    prompt = pair.like(ask.prompt, _TOKENS + more, edits)
    assert pair.decoded(prompt, ask.answer).status == _FINISHED
    again = pair.like(prompt, edits=edits)
    assert pair.decoded(again).status == _FINISHED
    assert pair.decode.wrong(prompt)[0] > 0
    assert pair.decode.wrong(again)[0] > 0, "it is in D's prefix cache"
