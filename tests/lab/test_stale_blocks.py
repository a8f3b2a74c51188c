"""Blocks that P gives to another request before D has read them: who notices.

P's lease is short and D comes late; meanwhile the blocks have got another request's tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS
from kvpatch.load.read_request import HOLD as FIELD

from .case import MIRRORED, EngineSpec
from .engine_api import Ask, Left, Prompt
from .host import Lab
from .releases import has_runners_rows
from .selection import in_turns
from .stage import Actor, Stage
from .test_cache_groups import BLOCK_TOKENS, engine_of
from .test_layer_kinds import DEEPSEEK_V4, RUNNERS_DEEPSEEK_V4
from .test_several_peers import SPEC, TOKENS, assert_identical, introduce, loaded, names

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_LEASE_SECONDS = 1
_TIMEOUT = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
_EXTRA = {"kv_lease_duration": _LEASE_SECONDS}
#: How D's blocks differ from P's.
UNLIKE = {"like": SPEC, "unlike": replace(SPEC, block_tokens=32)}


def prefill(stage: Stage, spec: EngineSpec, *, patched: bool) -> Actor:
    """A P that soon lets go of what nobody reads."""
    settings = (*spec.settings, (_TIMEOUT, str(_LEASE_SECONDS)))
    spec = replace(spec, settings=settings, patched=patched)
    return stage.start(spec, _EXTRA)


@dataclass(frozen=True)
class Scene:
    """P of each kind with kvpatch and without, and a D with kvpatch, all acquainted."""

    stage: Stage
    release: str
    prefill: dict[tuple[str, bool], Actor]
    decode: Actor

    def fresh(self, actor: Actor) -> tuple[Prompt, Ask]:
        prompt = self.stage.prompt(TOKENS)
        (ask,) = actor.compute(prompt)
        return prompt, ask

    def serve(self, actor: Actor) -> Prompt:
        """A fresh prompt, which D has loaded as P had it."""
        prompt, ask = self.fresh(actor)
        self.decode.ask(ask)
        assert_identical(self.decode, [prompt], loaded(prompt, self.release))
        return prompt

    def stale(self, actor: Actor) -> tuple[Prompt, Ask]:
        """A prompt whose blocks another request has got since."""
        prompt, ask = self.fresh(actor)
        time.sleep(_LEASE_SECONDS + 0.1)
        assert actor.heard([prompt]) == names([prompt]), "P has let go of it"
        actor.call("hand_on", prompt.name)
        return prompt, ask


@pytest.fixture(scope="module")
def scene(lab: Lab) -> Iterator[Scene]:
    if not FACTS[lab.release].listens_in_scheduler:
        pytest.skip("<= 0.11.0 P cannot say where its tables are")
    with Stage(lab) as stage:
        actors = {
            (kind, patched): prefill(stage, spec, patched=patched)
            for kind, spec in UNLIKE.items()
            for patched in (True, False)
        }
        decode = stage.decode(SPEC)
        introduce(decode, stage.prompts(len(actors), TOKENS), *actors.values())
        yield Scene(stage, lab.release, actors, decode)


@pytest.mark.parametrize("kind", UNLIKE)
def test_stale_blocks_are_not_taken_for_the_requests(scene: Scene, kind: str) -> None:
    """The load fails; good ones before and after it are identical."""
    actor = scene.prefill[kind, True]
    before = scene.serve(actor)
    prompt, ask = scene.stale(actor)

    scene.decode.ask(ask)

    scene.decode.must_fail(prompt)
    after = scene.serve(actor)
    assert actor.heard([before, after]) == names([before, after])


@pytest.mark.on(listens_in_scheduler=True)  # else: <= 0.11.0 P cannot say where its tables are
@pytest.mark.parametrize("kind", UNLIKE)
def test_an_answer_from_before_p_started_anew_is_not_loaded(
    stage: Stage, lab: Lab, kind: str
) -> None:
    """Under the same id, by a D that has met the new P alone; its blocks are another prompt's."""
    spec = replace(UNLIKE[kind], patched=True)
    first = stage.prefill(spec)
    old = stage.prompt(TOKENS)
    (answer,) = first.compute(old)
    first.die()
    second, decode = (
        stage.prefill(spec, port=first.port, engine_id=first.engine_id),
        stage.decode(SPEC),
    )
    introduce(decode, stage.prompts(1, TOKENS), second)
    held = stage.prompt(TOKENS)
    (ask,) = second.compute(held)

    decode.ask(answer)

    decode.must_fail(old)
    decode.ask(ask)
    assert_identical(decode, [held], loaded(held, lab.release))


@pytest.mark.on(since="0.21")  # else: a P without kvpatch does not say how many tokens it holds
def test_blocks_of_the_size_before_p_started_anew_are_not_loaded(stage: Stage) -> None:
    """As above, and P has no kvpatch: it names more blocks than its tokens fill now."""
    first, old = stage.prefill(SPEC), stage.prompt(TOKENS)
    (answer,) = first.compute(old)
    first.die()
    larger = replace(SPEC, block_tokens=4 * SPEC.block_tokens)
    second = stage.prefill(larger, port=first.port, engine_id=first.engine_id)
    decode = stage.decode(SPEC)
    second.compute(stage.prompt(TOKENS))

    decode.ask(answer)

    decode.must_fail(old)


@pytest.mark.on(listens_in_scheduler=True)  # else: <= 0.11.0 P cannot say where its tables are
def test_a_like_pair_is_checked_without_a_thread(stage: Stage, lab: Lab) -> None:
    """Nor is there one before the first heterogeneous peer; like loads go on beside it."""
    like, decode = prefill(stage, SPEC, patched=True), stage.decode(SPEC)
    introduce(decode, stage.prompts(1, TOKENS), like)
    scene = Scene(stage, lab.release, {}, decode)
    prompt, ask = scene.stale(like)
    decode.ask(ask)
    decode.must_fail(prompt)
    scene.serve(like)
    ours = ("kvpatch-reads", "kvpatch-copies")
    assert not [name for name in decode.call("threads") if name.startswith(ours)]

    other = prefill(stage, UNLIKE["unlike"], patched=True)
    introduce(decode, stage.prompts(1, TOKENS), other)
    after = [scene.fresh(actor) for actor in (like, other, like, other)]
    decode.ask(*(ask for _, ask in after))
    prompts = [prompt for prompt, _ in after]
    assert_identical(decode, prompts, sum(loaded(one, lab.release) for one in prompts))


def test_a_like_load_that_was_long_on_its_way_asks_before_it_is_read(
    stage: Stage, lab: Lab
) -> None:
    """And is identical: P's lease is a long one."""
    like = stage.prefill(replace(SPEC, patched=True))
    decode = stage.decode(SPEC)
    introduce(decode, stage.prompts(1, TOKENS), like)
    prompts = stage.prompts(2, TOKENS)
    asks = like.compute(*prompts)
    time.sleep(1.1)
    decode.ask(*asks)
    assert_identical(decode, prompts, sum(loaded(one, lab.release) for one in prompts))
    assert like.heard(prompts) == names(prompts)


@pytest.mark.parametrize("kind", UNLIKE)
def test_from_a_p_without_kvpatch_they_are_wrong_and_nobody_notices(
    scene: Scene, kind: str
) -> None:
    """The negative control: what the word of P's is needed for."""
    prompt, ask = scene.stale(scene.prefill[kind, False])

    scene.decode.ask(ask)

    scene.decode.must_receive(prompt)
    wrong, total = scene.decode.wrong(prompt)
    assert wrong == total > 0


@pytest.mark.parametrize("kind", UNLIKE)
def test_without_ps_word_in_the_answer_nothing_is_asked(scene: Scene, kind: str) -> None:
    """A proxy that leaves out what it does not know gets what stock gives."""
    prompt, ask = scene.fresh(scene.prefill[kind, True])
    answer = json.loads(ask.answer)
    assert answer.pop(FIELD)

    scene.decode.ask(replace(ask, answer=json.dumps(answer)))

    assert_identical(scene.decode, [prompt], loaded(prompt, scene.release))


@pytest.mark.parametrize("kind", UNLIKE)
def test_the_word_of_another_request_is_not_this_ones(scene: Scene, kind: str) -> None:
    """P still holds the blocks, but the answer carries an earlier request's word."""
    actor = scene.prefill[kind, True]
    earlier, ask_earlier = scene.fresh(actor)
    prompt, ask = scene.fresh(actor)
    scene.decode.ask(ask_earlier)
    scene.decode.must_receive(earlier)
    assert actor.heard([earlier]) == names([earlier])
    swapped = json.loads(ask.answer) | {FIELD: json.loads(ask_earlier.answer)[FIELD]}

    scene.decode.ask(replace(ask, answer=json.dumps(swapped)))

    scene.decode.must_fail(prompt)


@pytest.mark.parametrize(
    ("address", "kind"), in_turns(["ffffffffffffff0", "8000000000000", "1000"], list(UNLIKE))
)
def test_a_word_at_a_forged_address_fails_its_own_load(
    scene: Scene, kind: str, address: str
) -> None:
    """Whoever passes the answer on may have written anything into it: no table can be there."""
    actor = scene.prefill[kind, True]
    prompt, ask = scene.fresh(actor)
    forged = json.loads(ask.answer) | {FIELD: f"1/2/{address}"}
    scene.decode.ask(replace(ask, answer=json.dumps(forged)))
    scene.decode.must_fail(prompt)
    scene.serve(actor)


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_word_that_cannot_be_read_proves_nothing_and_turns_no_check_off(
    scene: Scene, kind: str
) -> None:
    """Where a table may be, and none is."""
    actor = scene.prefill[kind, True]
    for _ in range(4):
        prompt, ask = scene.fresh(actor)
        answer = json.loads(ask.answer)
        start, _, table = answer[FIELD].rpartition("/")
        answer[FIELD] = f"{start}/{int(table, 16) ^ 1 << 44:x}"
        scene.decode.ask(replace(ask, answer=json.dumps(answer)))
        assert_identical(scene.decode, [prompt], loaded(prompt, scene.release))
    prompt, ask = scene.stale(actor)
    scene.decode.ask(ask)
    scene.decode.must_fail(prompt)


def _lose(stage: Stage, spec: EngineSpec, decode: Actor, cause: str) -> Prompt:
    """A load that fails: P lets go of its blocks, or dies."""
    actor = prefill(stage, spec, patched=True)
    introduce(decode, stage.prompts(1, TOKENS), actor)
    if cause == "gone":
        prompt, ask = Scene(stage, "", {}, decode).stale(actor)
        decode.ask(ask)
    else:
        prompt = stage.prompt(TOKENS)
        (ask,) = actor.compute(prompt)
        actor.hold()
        decode.ask(ask)
        actor.die()
    decode.must_fail(prompt)
    decode.call("loaded", [prompt.name])
    return prompt


def _assert_computed(decode: Actor, prompt: Prompt) -> None:
    assert decode.finish(prompt) == "FINISHED_LENGTH_CAPPED"
    assert decode.wrong(prompt)[0] == 0


def _assert_nothing_wrong_is_cached(decode: Actor, prompt: Prompt) -> None:
    """A plain request with the same prompt finds the right bytes in the prefix cache, or none."""
    plain = replace(prompt, name=f"{prompt.name}-plain")
    decode.call("begin_own", [plain])
    _assert_computed(decode, plain)


#: By name: what the operator likes, what becomes of P, and if D computes the load then.
_FAILED = {
    "by default": ("", "gone", True),
    "as the operator likes": ("fail", "gone", False),
    "a transfer that failed": ("", "dead", False),
}
_KINDS = ["like", "unlike", "2 ranks"]


@pytest.mark.on(since="0.13")  # else: all loads that fail are computed, or none
@pytest.mark.parametrize(
    ("name", "kind"),
    dict.fromkeys([*(("by default", kind) for kind in _KINDS), *in_turns(_FAILED, _KINDS)]),
)
def test_d_computes_what_a_check_fails(stage: Stage, kind: str, name: str) -> None:
    """Whatever the policy for transfers says; D's scheduler is the release's own."""
    how, cause, is_computed = _FAILED[name]
    ranks = 2 if kind == "2 ranks" else 1
    settings = (("KVPATCH_ON_FAILED_CHECK", how),) if how else ()
    spec = replace(SPEC, tp_size=ranks)
    of_decode = replace(
        UNLIKE.get(kind, SPEC), tp_size=ranks, own_scheduler=True, load_failure_policy="fail"
    )
    of_decode = replace(of_decode, settings=(*of_decode.settings, *settings))
    decode = stage.decode(of_decode)
    prompt = _lose(stage, spec, decode, cause)
    if is_computed:
        _assert_computed(decode, prompt)
    else:
        assert decode.call("scheduler.status", prompt.name) == "FINISHED_ERROR"
    _assert_nothing_wrong_is_cached(decode, prompt)


@pytest.mark.on(since="0.18")
def test_so_it_does_where_the_model_has_several_cache_groups(stage: Stage) -> None:
    spec, of_decode = (
        replace(engine_of("two groups", tokens), kv_heads=4) for tokens in BLOCK_TOKENS["32 to 64"]
    )
    decode = stage.decode(replace(of_decode, load_failure_policy="fail"))
    _assert_computed(decode, _lose(stage, spec, decode, "gone"))


@pytest.mark.on(listens_in_scheduler=True)  # else: <= 0.11.0 P cannot say where its tables are
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_d_without_kvpatch_takes_no_notice(stage: Stage, lab: Lab, ranks: int) -> None:
    """P's answer has one field more, and its agent more memory."""
    spec = replace(SPEC, tp_size=ranks)
    actor, decode = prefill(stage, spec, patched=True), stage.decode(spec, patched=False)
    prompt = stage.prompt(TOKENS)
    (ask,) = actor.compute(prompt)
    tables = json.loads(ask.answer)[FIELD].rpartition("/")[2].split(",")
    assert len(set(tables)) == ranks

    decode.ask(ask)

    assert_identical(decode, [prompt], loaded(prompt, lab.release))
    assert actor.heard([prompt]) == names([prompt])


@pytest.mark.on(listens_in_scheduler=True)  # else: <= 0.11.0 P cannot say where its tables are
@pytest.mark.parametrize(("remote_ranks", "local_ranks"), [(2, 2), (2, 1), (1, 2)])
def test_each_rank_is_asked(stage: Stage, lab: Lab, remote_ranks: int, local_ranks: int) -> None:
    """A load is good where all of P's ranks held the blocks; stale ones fail on all of D's."""
    actor = prefill(stage, replace(SPEC, tp_size=remote_ranks), patched=True)
    decode = stage.decode(replace(SPEC, tp_size=local_ranks))
    introduce(decode, stage.prompts(1, TOKENS), actor)
    scene = Scene(stage, lab.release, {}, decode)
    prompt, ask = scene.fresh(actor)
    decode.ask(ask)
    decode.must_hold(prompt)
    assert actor.heard([prompt]) == names([prompt])
    prompt, ask = scene.stale(actor)

    decode.ask(ask)

    decode.must_fail(prompt)


@pytest.mark.on(listens_in_scheduler=True)  # else: <= 0.11.0 P cannot say where its tables are
def test_an_answer_of_fewer_ranks_than_are_read_fails_the_load(stage: Stage, lab: Lab) -> None:
    """The ranks that are asked before one is missing leave nothing behind."""
    spec = replace(SPEC, tp_size=2)
    actor, decode = prefill(stage, spec, patched=True), stage.decode(spec)
    introduce(decode, stage.prompts(1, TOKENS), actor)
    before = decode.left()
    for _ in range(2):
        prompt = stage.prompt(TOKENS)
        (ask,) = actor.compute(prompt)
        answer = json.loads(ask.answer)
        answer[FIELD] = answer[FIELD].rpartition(",")[0]
        decode.ask(replace(ask, answer=json.dumps(answer)))
        decode.must_fail(prompt)
    good = stage.prompt(TOKENS)
    decode.ask(*actor.compute(good))
    assert_identical(decode, [good], loaded(good, lab.release))
    # The rank that was read keeps its part in the release's books.
    assert replace(decode.left(), transfers=before.transfers, metadata=before.metadata) == before


# -- caches that kvpatch does not read into: the release alone reads, and what it reads is checked

_UNREAD = {
    "deepseek-v4": DEEPSEEK_V4,
    "summaries": EngineSpec(
        layout="BLHNC", block_tokens=64, planned_blocks=60, kinds=("", "summary")
    ),
    "the release's mirror": replace(SPEC, device=MIRRORED, own_scheduler=True),
    "shared layers": replace(SPEC, sharing_layers=1),
    "context parallelism": replace(SPEC, contexts=2, tp_size=2),
}


def _has(release: str, cache: str) -> bool:
    facts = FACTS[release]
    if cache == "the release's mirror":
        return facts.has_host_buffer_layout
    if cache == "context parallelism":
        return facts.context_sizes
    if cache == "shared layers" and Version("0.18") <= Version(release) < Version("0.24"):
        return False  # stock does not register them
    if cache == "deepseek-v4" and has_runners_rows(release):
        return True
    since = {"deepseek-v4": "0.30", "summaries": "0.30"}.get(cache, "0")
    return Version(release) >= Version(since)


@pytest.mark.on(listens_in_scheduler=True)  # else: <= 0.11.0 P cannot say where its tables are
@pytest.mark.parametrize("cache", _UNREAD)
def test_stale_blocks_of_caches_that_the_release_alone_reads(
    stage: Stage, lab: Lab, cache: str
) -> None:
    if not _has(lab.release, cache):
        pytest.skip("this release has no such cache, or lays it out in the model's runner")
    spec = _UNREAD[cache]
    if cache == "deepseek-v4" and has_runners_rows(lab.release):
        spec = RUNNERS_DEEPSEEK_V4
    is_compared = spec.contexts == 1
    decode = stage.decode(spec)
    for patched in (True, False):
        actor = prefill(stage, spec, patched=patched)
        introduce(decode, stage.prompts(1, 300), actor)
        prompt, ask = Scene(stage, lab.release, {}, decode).stale(actor)
        decode.ask(ask)
        if patched:
            decode.must_fail(prompt)
        else:  # the negative control
            decode.must_receive(prompt)
            wrong, total = decode.wrong(prompt)
            assert (wrong, total > 0) == (total, is_compared)

        prompt = stage.prompt(300)
        decode.ask(*actor.compute(prompt))
        decode.must_receive(prompt)
        wrong, total = decode.wrong(prompt)
        assert (wrong, total > 0) == (0, is_compared)
        assert actor.heard([prompt]) == names([prompt])


@pytest.mark.on(since="0.32")
def test_d_computes_a_load_of_compressed_caches_that_fails(stage: Stage) -> None:
    spec = replace(DEEPSEEK_V4, own_scheduler=True, load_failure_policy="fail")
    decode = stage.decode(spec)
    prompt = _lose(stage, spec, decode, "gone")
    _assert_computed(decode, prompt)
    _assert_nothing_wrong_is_cached(decode, prompt)


# -- sleep mode: what NIXL was handed is let go of, and handed to it again ----------------------

_SLEEPS = pytest.mark.on(since="0.33")
_ASLEEP = {
    "as is": SPEC,
    "staged": replace(SPEC, settings=(("KVPATCH_TRANSFER", "staged"),)),
    "through a host buffer": replace(SPEC, settings=(("KVPATCH_HOST_BUFFER", "always"),)),
}


@_SLEEPS
@pytest.mark.parametrize("way", _ASLEEP)
def test_a_heterogeneous_pair_goes_on_after_either_has_slept(stage: Stage, way: str) -> None:
    remote = stage.prefill(replace(SPEC, block_tokens=16, planned_blocks=400))
    decode = stage.decode(_ASLEEP[way])
    for sleepers in ((), (remote,), (decode,), (remote, decode), ()):
        for sleeper in sleepers:
            sleeper.call("sleep_and_wake")
        if decode in sleepers:
            assert not decode.call("has_pool")
        prompt = stage.load(remote, decode, TOKENS)
        assert remote.heard([prompt]) == {prompt.name}
        assert decode.call("has_pool")
    assert decode.strays() == 0
    assert decode.left() == Left()


@_SLEEPS
@pytest.mark.parametrize("block_tokens", [SPEC.block_tokens, 16])
def test_what_p_held_before_it_slept_is_gone(stage: Stage, block_tokens: int) -> None:
    """Its requests are P's still, but their blocks hold nothing any more."""
    spec = replace(SPEC, block_tokens=block_tokens, planned_blocks=400)
    actor, decode = prefill(stage, spec, patched=True), stage.decode(SPEC)
    prompt = stage.prompt(TOKENS)
    asks = actor.compute(prompt)
    actor.call("sleep_and_wake")

    decode.ask(*asks)

    decode.must_fail(prompt)
