"""Requests that are aborted, peers that die, come back or cannot be read, while others go on.

A load that fails takes nothing else with it: from 0.11.1 on its request is failed, before
that it is left waiting. In stock a NIXL error or a failed handshake ends D's engine, <= 0.13
and <= 0.21.
D stages all it reads, through a pool of two blocks: the longest way there is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from packaging.version import Version

from .case import EngineSpec
from .engine_api import Ask, Left, Prompt, Seen
from .host import Lab
from .releases import states_block_size, states_layout
from .stage import Actor, Raised, Stage
from .test_cache_groups import BLOCK_TOKENS, engine_of
from .test_several_peers import (
    SPEC,
    TOKENS,
    assert_identical,
    engine,
    held,
    introduce,
    loaded,
    names,
    unlike,
)

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

# 64 tokens of keys and values of 2 heads of 16 channels of float32, twice.
POOL_BYTES = 2 * 64 * 2 * 2 * 16 * 4
STAGED = replace(
    SPEC, settings=(("KVPATCH_TRANSFER", "staged"), ("KVPATCH_STAGING_BYTES", str(POOL_BYTES)))
)
_OVER_SECONDS = 20.0
#: A block of this one is larger than the pool.
UNREADABLE = {"block_tokens": 512, "planned_blocks": 10}


def reports_failures(release: str) -> bool:
    """Whether a load can fail alone; <= 0.11.0 it is left waiting."""
    return Version(release) >= Version("0.11.1")


@dataclass(frozen=True)
class Pair:
    """An unlike pair that outlives what is done to its requests."""

    stage: Stage
    prefill: Actor
    decode: Actor


@pytest.fixture(scope="module")
def pair(lab: Lab) -> Iterator[Pair]:
    with Stage(lab) as opened:
        found = Pair(opened, opened.prefill(unlike(lab.release)[0]), opened.decode(STAGED))
        introduce(found.decode, opened.prompts(1, TOKENS), found.prefill)
        yield found


def assert_served(stage: Stage, release: str, prefill: Actor, decode: Actor) -> None:
    """A new request is read whole, and nothing of earlier ones is left."""
    prompt = stage.prompt(TOKENS)
    assert decode.ask(*prefill.compute(prompt)) == loaded(prompt, release)
    assert_identical(decode, [prompt], loaded(prompt, release))
    assert prefill.heard([prompt]) == {prompt.name}


def assert_failed_alone(
    decode: Actor, release: str, lost: Sequence[Prompt], kept: Sequence[Prompt] = ()
) -> Seen:
    """Failed, or left waiting where none can be failed; no byte came, and nothing is left.

    Args:
        kept: what is read at the same time. Who looks at the memory while NIXL itself writes to it,
            which no thread of ours can hold up, undoes some of that.
    """
    decode.must_receive(*kept)
    if reports_failures(release):
        decode.must_fail(*lost)
    end = time.monotonic() + _OVER_SECONDS
    while True:
        seen = decode.watch(*lost, seconds=0.1)
        left = decode.left()
        # What the worker has told the scheduler of, or given up, it holds no more.
        if not (left.transfers | left.metadata) & names(lost):
            break
        assert time.monotonic() < end, left
    if not reports_failures(release):
        assert seen.waiting == names(lost), seen
        for prompt in lost:
            decode.abort(prompt)
    assert untouched(decode, lost)
    assert decode.strays() == 0
    return seen


def untouched(decode: Actor, prompts: Sequence[Prompt]) -> bool:
    """Whether no token of P's came; the rest of a last block is zeroed before."""
    wrong, total = decode.wrong(*prompts)
    return wrong > 0.9 * total


# -- aborts ----------------------------------------------------------------


def test_an_abort_in_mid_transfer(pair: Pair, lab: Lab) -> None:
    """The read goes on, and is reported when it is over: not before may its blocks be used."""
    stage, prefill, decode = pair.stage, pair.prefill, pair.decode
    aborted, _ = prompts = stage.prompts(2, TOKENS)
    asks = prefill.compute(*prompts)

    with held(prefill):
        decode.ask(*asks)
        decode.abort(aborted)
        assert decode.watch(*prompts, seconds=0.1).waiting == names(prompts)
        assert untouched(decode, prompts)

    # Both, the aborted one as well: it is reported with every byte in its place.
    assert_identical(decode, prompts, sum(loaded(p, lab.release) for p in prompts))
    assert prefill.heard(prompts) == names(prompts)
    assert_served(stage, lab.release, prefill, decode)
    # Nothing came after the report.
    assert decode.wrong(*prompts)[0] == 0


def test_an_abort_before_the_read(pair: Pair, lab: Lab) -> None:
    """D tells P to let go of the blocks, and reads none of them."""
    stage, prefill, decode = pair.stage, pair.prefill, pair.decode
    prompt = stage.prompt(TOKENS)

    decode.call("refuse", *prefill.compute(prompt))

    assert prefill.heard([prompt]) == {prompt.name}
    assert decode.strays() == 0
    # Releases from 0.11.1 to 0.31 keep the metadata of a request that only notifies.
    assert replace(decode.left(), metadata=frozenset()) == Left()
    assert_served(stage, lab.release, prefill, decode)


# -- death -----------------------------------------------------------------


def assert_outlives(
    decode: Actor, stage: Stage, release: str, mortal: Actor, survivor: Actor
) -> None:
    """One P dies while D reads from two: what the other had is read whole, and goes on to be."""
    introduce(decode, stage.prompts(2, TOKENS), mortal, survivor)
    lost, kept = stage.prompts(2, TOKENS), stage.prompts(2, TOKENS)
    asks = [*mortal.compute(*lost), *survivor.compute(*kept)]
    asks = [asks[i] for i in (0, 2, 1, 3)]

    with held(survivor):
        mortal.hold()
        decode.ask(*asks)
        assert decode.watch(*lost, *kept, seconds=0.1).waiting == names([*lost, *kept])
        mortal.die()

    assert_failed_alone(decode, release, lost, kept)
    assert_identical(decode, kept, sum(loaded(p, release) for p in kept))
    assert survivor.heard(kept) == names(kept)
    assert_served(stage, release, survivor, decode)


def test_death_in_mid_transfer(stage: Stage, lab: Lab) -> None:
    mortal, survivor = (stage.prefill(spec) for spec in unlike(lab.release))
    assert_outlives(stage.decode(STAGED), stage, lab.release, mortal, survivor)


@pytest.mark.on(states_layout=True)
def test_death_of_two_ranks(stage: Stage, lab: Lab) -> None:
    """The read of one fails before the other's; from 0.22 to 0.29 the second ended D's engine."""
    ranks, alone = engine(tp_size=2, kv_heads=4, block_tokens=32), engine(kv_heads=4)
    mortal, survivor = stage.prefill(ranks), stage.prefill(alone)
    decode = stage.decode(replace(STAGED, kv_heads=4))
    introduce(decode, stage.prompts(2, TOKENS), mortal, survivor)
    lost = stage.prompts(4, TOKENS)
    asks = mortal.compute(*lost)

    mortal.hold()
    decode.ask(*asks)
    assert decode.watch(*lost, seconds=0.1).waiting == names(lost)
    mortal.die()

    assert_failed_alone(decode, lab.release, lost)
    assert_served(stage, lab.release, survivor, decode)


@pytest.mark.on(before="0.14")  # NIXL's errors are not caught, or their own report ends D
def test_stock_dies_with_its_peer(stage: Stage) -> None:
    mortal, decode = stage.prefill(SPEC), stage.decode(SPEC, patched=False)
    introduce(decode, stage.prompts(1, TOKENS), mortal)
    prompt = stage.prompt(TOKENS)
    asks = mortal.compute(prompt)

    mortal.hold()
    decode.ask(*asks)
    mortal.die()

    with pytest.raises(Raised, match="DISCONNECT|recving_metadata"):
        decode.watch(prompt)


@pytest.mark.parametrize("is_known", [True, False], ids=["read", "handshake"])
def test_death_before(stage: Stage, lab: Lab, is_known: bool) -> None:
    """<= 0.11.0 stock waits for a handshake's answer for ever, and with it those behind it."""
    mortal, survivor = (stage.prefill(spec) for spec in unlike(lab.release))
    decode = stage.decode(STAGED)
    if is_known:
        introduce(decode, stage.prompts(2, TOKENS), mortal, survivor)
    lost, kept = stage.prompts(2, TOKENS)
    asks = [*mortal.compute(lost), *survivor.compute(kept)]
    mortal.die()

    decode.ask(*asks)

    if not (is_known or reports_failures(lab.release)):
        decode.must_log(lost, "nobody answers at")
    assert_failed_alone(decode, lab.release, [lost], [kept])
    assert_identical(decode, [kept], loaded(kept, lab.release))
    assert_served(stage, lab.release, survivor, decode)


@pytest.mark.on(since="0.11.1", before="0.22")  # before, it waits for ever
def test_stock_ends_with_a_handshake(stage: Stage) -> None:
    """`get_finished` looks up the block size of a peer that was refused."""
    mortal, decode = stage.prefill(SPEC), stage.decode(SPEC, patched=False)
    prompt = stage.prompt(TOKENS)
    asks = mortal.compute(prompt)
    mortal.die()

    decode.ask(*asks)

    with pytest.raises(Raised, match="KeyError"):
        decode.watch(prompt)
        decode.call("idle", 2)  # the load may be said to have failed a step before D ends by it


@pytest.mark.on(before="0.11.1", states_layout=True)  # else: it fails alone, or no unlike pair
def test_a_load_fails_under_the_name_of_a_request_that_is_over(stage: Stage, lab: Lab) -> None:
    """<= 0.11.0 a failed load is reported once its client is gone: not the one before it."""
    prefill, decode = stage.prefill(unlike(lab.release)[0]), stage.decode(STAGED)
    computed, other = stage.prompts(2, TOKENS)
    introduce(decode, [computed], prefill)
    retry = replace(other, name=computed.name)
    (ask,) = prefill.compute(other)

    prefill.hold()
    decode.call("retry", Ask(retry, ask.answer))
    assert decode.watch(retry, seconds=0.0).waiting == {retry.name}
    prefill.die()
    decode.must_log(retry, retry.name)

    seen = decode.watch(retry, seconds=1.0)
    assert seen.waiting == {retry.name}, "its client waits, and nothing was read"


def test_a_peer_that_hangs(stage: Stage, lab: Lab) -> None:
    """Nobody can tell it from a slow one; requests of others are not to wait for it."""
    hung, other = (stage.prefill(spec) for spec in unlike(lab.release))
    decode = stage.decode(STAGED)
    introduce(decode, stage.prompts(2, TOKENS), hung, other)
    stuck = stage.prompts(3, TOKENS)
    asks = hung.compute(*stuck)

    with held(hung):
        decode.ask(*asks)
        prompt = stage.prompt(TOKENS)
        decode.ask(*other.compute(prompt))
        decode.must_receive(prompt)
        seen = decode.watch(*stuck, seconds=0.1)
        assert all(prompt.name in seen.standstill for prompt in stuck)
        assert ": PROC" in seen.standstill
        assert "thread MainThread" in seen.standstill
        # 0.10.0 itself reads this P, whose layout nobody knows: no thread of kvpatch's runs there.
        assert ("thread kvpatch-reads" in seen.standstill) == states_layout(lab.release)

    assert_identical(decode, [*stuck, prompt], 4 * loaded(prompt, lab.release))


# -- return ----------------------------------------------------------------


def test_return_under_a_new_id(stage: Stage, lab: Lab) -> None:
    """What vLLM does if not told otherwise: another id, the same port, here another geometry."""
    before, after = unlike(lab.release)
    first, decode = stage.prefill(before), stage.decode(STAGED)
    introduce(decode, stage.prompts(1, TOKENS), first)
    first.die()

    second = stage.prefill(after, port=first.port)
    introduce(decode, stage.prompts(1, TOKENS), second)

    assert_served(stage, lab.release, second, decode)
    assert_served(stage, lab.release, second, decode)


def test_return_under_the_same_id(stage: Stage, lab: Lab) -> None:
    """D keeps the old handshake, and fails requests until it is restarted: never wrong bytes."""
    before, after = unlike(lab.release)
    first, decode = stage.prefill(before), stage.decode(STAGED)
    introduce(decode, stage.prompts(1, TOKENS), first)
    first.die()
    second = stage.prefill(after, port=first.port, engine_id=first.engine_id)

    outcomes = [_outcome(stage, lab.release, second, decode) for _ in range(3)]

    # No release meets it again of itself, not for a like one either; were one to,
    # `_outcome` would have compared every byte.
    possible = {"failed", "ended", "identical"}
    if not reports_failures(lab.release):
        possible.add("waiting")
    assert set(outcomes) <= possible, outcomes


def _outcome(stage: Stage, release: str, prefill: Actor, decode: Actor) -> str:
    prompt = stage.prompt(TOKENS)
    try:
        decode.ask(*prefill.compute(prompt))
        seconds = _OVER_SECONDS if reports_failures(release) else 3.0
        seen = decode.watch(prompt, seconds=seconds)
    except Raised:
        return "ended"
    if prompt.name in seen.received:
        assert_identical(decode, [prompt], loaded(prompt, release))
        return "identical"
    assert untouched(decode, [prompt])
    assert decode.strays() == 0
    return "failed" if prompt.name in seen.failed else "waiting"


# -- refusal ---------------------------------------------------------------


def unreadable(release: str) -> EngineSpec:
    """One that is refused at the handshake."""
    # <= 0.11.0 D asks for nothing of the large ones before it knows them: another model.
    other_model = {"block_tokens": 25, "head_dim": 18}
    return engine(**(UNREADABLE if states_block_size(release) else other_model))


def test_an_unreadable_peer(stage: Stage, lab: Lab) -> None:
    refusing = stage.prefill(unreadable(lab.release))
    readable, decode = stage.prefill(unlike(lab.release)[0]), stage.decode(STAGED)
    introduce(decode, stage.prompts(1, TOKENS), readable)
    refused, again, kept = stage.prompts(3, TOKENS)
    asks = [*refusing.compute(refused), *readable.compute(kept)]

    with held(readable):
        decode.ask(*asks)
        decode.must_log(refused, "cannot be read")
        assert_failed_alone(decode, lab.release, [refused])

    assert_identical(decode, [kept], loaded(kept, lab.release))
    decode.ask(*refusing.compute(again))
    assert_failed_alone(decode, lab.release, [again])
    assert_served(stage, lab.release, readable, decode)


@pytest.mark.on(loads_whole_blocks_only=False)  # else: like peers alone
def test_blocks_that_do_not_hold_the_tokens(pair: Pair, lab: Lab) -> None:
    """A refusal while the read is posted, after the handshake."""
    stage, prefill, decode = pair.stage, pair.prefill, pair.decode
    refused, kept = stage.prompts(2, TOKENS)
    short, whole = prefill.compute(refused, kept)

    decode.ask(_without_a_block(short), whole)

    assert_failed_alone(decode, lab.release, [refused])
    assert decode.written(refused) == 0
    assert prefill.heard([refused]) == {refused.name}
    assert_identical(decode, [kept], loaded(kept, lab.release))
    assert_served(stage, lab.release, prefill, decode)


def _without_a_block(ask: Ask) -> Ask:
    answer = json.loads(ask.answer)
    blocks = answer["remote_block_ids"]
    answer["remote_block_ids"] = (
        [group[:-1] for group in blocks] if isinstance(blocks[0], list) else blocks[:-1]
    )
    return replace(ask, answer=json.dumps(answer))


# -- several cache groups -----------------------------------------------------
#
# D's scheduler is the release's own. <= 0.29 stock calls such a load received, and the model would
# go on over memory that nobody wrote.

_GROUPS = pytest.mark.on(since="0.18")
_P, _D = (
    replace(engine_of("two groups", tokens), kv_heads=4) for tokens in BLOCK_TOKENS["32 to 64"]
)


def _lose(stage: Stage, decode: Actor, spec: EngineSpec) -> tuple[Prompt, int]:
    """A prompt whose P dies while it is read; the blocks that D had free before."""
    prefill = stage.prefill(spec)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    free = int(decode.call("scheduler.free_blocks"))
    prompt = stage.prompt(TOKENS)
    asks = prefill.compute(prompt)
    prefill.hold()
    decode.ask(*asks)
    assert decode.call("scheduler.free_blocks") < free
    prefill.die()
    return prompt, free


@_GROUPS
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_of_several_groups_fails(stage: Stage, ranks: int) -> None:
    decode = stage.decode(replace(_D, load_failure_policy="fail"))

    prompt, free = _lose(stage, decode, replace(_P, tp_size=ranks))
    seen = decode.watch(prompt)
    decode.call("loaded", [prompt.name])

    assert seen.failed == {prompt.name}, seen
    assert decode.call("scheduler.status", prompt.name) == "FINISHED_ERROR"
    assert decode.call("scheduler.free_blocks") == free
    assert untouched(decode, [prompt])
    stage.load(stage.prefill(_P), decode, TOKENS)


@_GROUPS
@pytest.mark.every_release
def test_a_load_of_several_groups_is_computed_again(stage: Stage) -> None:
    decode = stage.decode(replace(_D, load_failure_policy="recompute"))

    prompt, free = _lose(stage, decode, _P)
    decode.must_fail(prompt)
    decode.call("loaded", [prompt.name])

    assert untouched(decode, [prompt])
    assert decode.finish(prompt) == "FINISHED_LENGTH_CAPPED"
    assert decode.wrong(prompt)[0] == 0
    assert decode.call("scheduler.free_blocks") == free
    stage.load(stage.prefill(_P), decode, TOKENS)


@_GROUPS
@pytest.mark.on(before="0.30")
def test_stock_calls_a_load_of_several_groups_received(stage: Stage) -> None:
    decode = stage.decode(_P, patched=False)

    prompt, _ = _lose(stage, decode, _P)

    decode.must_receive(prompt)
    assert untouched(decode, [prompt])
