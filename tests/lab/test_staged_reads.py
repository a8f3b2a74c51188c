"""Direct or staged, the same bytes; a pool smaller than a request serves it in rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec
from .engine_api import Ask, Prompt, Seen
from .host import Lab
from .releases import moves_full_blocks_only, states_block_size
from .stage import Actor, Stage
from .test_like_pairs import tokens_to_move
from .test_several_peers import introduce
from .unlike import Dimensions, cases

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

SEED = 3
# Two of the largest blocks among the cases (128 tokens of 2 heads, K and V, 16 channels
# of float32) fit: a request of several blocks goes in many rounds, requests queue.
POOL_BYTES = 2 * 128 * 2 * 2 * 16 * 4
_READ_SECONDS = 0.5
_TIMEOUT = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
WAYS = {
    "direct": (("KVPATCH_TRANSFER", "direct"),),
    "staged": (("KVPATCH_TRANSFER", "staged"),),
    "staged in rounds": (
        ("KVPATCH_TRANSFER", "staged"),
        ("KVPATCH_STAGING_BYTES", str(POOL_BYTES)),
    ),
}
_DIMENSIONS = Dimensions(
    prompts=(1, 150, 300),
    hits=("none", "one block"),
    prefill_tokens=(16, 48, 128),
    decode_tokens=(32, 64, 128),
)
_CASES = {case.name: case for case in list(cases(_DIMENSIONS, SEED))[:5]}


def decode_with(case: Case, settings: tuple[tuple[str, str], ...]) -> Case:
    """The case with kvpatch on D alone, with its variables set so."""
    patched = case.patched(prefill=False)
    settings = (*case.decode.settings, *settings)
    return replace(patched, decode=replace(patched.decode, settings=settings))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", _CASES)
def test_every_way_of_reading_is_identical(lab: Lab, name: str, way: str) -> None:
    case = _CASES[name]

    report = lab.run(decode_with(case, WAYS[way])).must_be("identical")
    if moves_full_blocks_only(lab.release):  # where P's whole blocks end before ours, none
        assert report.moved_tokens <= tokens_to_move(case, lab.release)
        return
    assert report.moved_tokens == tokens_to_move(case, lab.release)


def test_a_block_larger_than_the_pool_is_refused_at_the_handshake(lab: Lab) -> None:
    case = next(c for c in _CASES.values() if c.prefill.family == "flash")
    settings = (("KVPATCH_TRANSFER", "staged"), ("KVPATCH_STAGING_BYTES", "100"))

    lab.run(decode_with(case, settings)).must_be("refused", "KVPATCH_STAGING_BYTES")


def staged_pair(stage: Stage, *settings: tuple[str, str]) -> tuple[Actor, Actor]:
    """A P, and a D that reads from it through a pool, of few blocks if not told otherwise."""
    prefill, decode = (
        EngineSpec("flash", "HND", tokens, 64, dtype="float32") for tokens in (32, 64)
    )
    always = (("KVPATCH_TRANSFER", "staged"), ("KVPATCH_STAGING_BYTES", str(POOL_BYTES)))
    return stage.prefill(prefill), stage.decode(replace(decode, settings=(*always, *settings)))


# no unlike pair here, or none of whose prompts D computes one
@pytest.mark.on(states_layout=True, states_block_size=False)
def test_a_retry_under_the_name_of_a_prompt_that_was_computed(stage: Stage) -> None:
    """<= 0.13: it is loaded before the workers hear that the first one is over."""
    prefill, decode = staged_pair(stage, ("KVPATCH_TRANSFER", "direct"))
    computed, other = stage.prompts(2, 300)
    introduce(decode, [computed], prefill)
    (ask,) = prefill.compute(other)
    retry = replace(other, name=computed.name)
    assert decode.call("retry", Ask(retry, ask.answer)) == retry.tokens
    time.sleep(_READ_SECONDS)  # the read is over before the step is

    decode.must_hold(retry)


# no unlike pair here, or blocks are kept until the read is over
@pytest.mark.on(states_layout=True, before="0.16")
def test_a_request_that_was_given_up_is_not_placed(stage: Stage) -> None:
    """On releases <= 0.15 its blocks are free at once, and may be another request's by now."""
    prefill, decode = staged_pair(stage, ("KVPATCH_STAGING_BYTES", str(1 << 20)))
    first, given_up, kept = stage.prompts(3, 300)
    introduce(decode, [first], prefill)
    asks = prefill.compute(given_up, kept)
    prefill.hold()
    decode.ask(*asks)
    decode.call("give_up", given_up.name)
    prefill.go_on()
    assert not decode.watch(given_up, kept).waiting

    assert decode.wrong(first, kept)[0] == 0
    wrong, total = decode.wrong(given_up)
    assert wrong > 0.9 * total, "nothing of it was placed"


@dataclass(frozen=True)
class LateRead:
    """One that waited until P, which says nothing of it, may have let go of its blocks."""

    decode: Actor
    waits: Prompt
    seen: Seen


def late_read(lab: Lab, stage: Stage, meet: Callable[[Actor], object] = lambda _: None) -> LateRead:
    """P keeps blocks for a fixed time (<= 0.21), or for as long as D goes on asking it to.

    Args:
        meet: is called with D once it has met P.
    """
    is_leased = Version(lab.release) >= Version("0.22")
    prefill, decode = staged_pair(stage, *(() if is_leased else ((_TIMEOUT, "2"),)))
    first, waits = stage.prompts(2, 300)
    introduce(decode, [first], prefill)
    meet(decode)
    (early,) = prefill.compute(first_of_two := stage.prompt(300))
    (late,) = prefill.compute(waits)
    prefill.hold()
    decode.ask(early, late)
    if is_leased:
        decode.call("end_leases")
    else:
        time.sleep(2.0)
    prefill.go_on()
    prefill.call("hand_on", waits.name)
    return LateRead(decode, waits, decode.watch(first_of_two, waits, seconds=5.0))


@pytest.mark.on(states_layout=True)  # else: no unlike pair here
def test_a_read_that_waited_until_the_peer_let_go_of_its_blocks_fails(
    stage: Stage, lab: Lab
) -> None:
    late = late_read(lab, stage)
    decode, waits, seen = late.decode, late.waits, late.seen

    assert waits.name not in seen.received, decode.wrong(waits)
    # On releases <= 0.11.0 no single load can fail.
    assert waits.name in (seen.failed if states_block_size(lab.release) else seen.waiting)
    assert decode.strays() == 0
