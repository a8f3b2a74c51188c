"""A client that gives up while D loads its prompt: whose are the blocks meanwhile?

Both schedulers are the release's own. <= 0.15 it hands out blocks that NIXL is writing to.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

from .engine_api import Ask, Prompt
from .host import Lab
from .releases import states_layout
from .stage import Actor, Stage
from .test_several_peers import SPEC, TOKENS, introduce

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

OWN = replace(SPEC, own_scheduler=True)
_OVER_SECONDS = 20.0


#: From 0.14 on the engine adds something to the name that a client chose.
_NAMED_BY_CLIENTS = pytest.mark.on(before="0.14")


@dataclass(frozen=True)
class Pair:
    """Two engines that have shaken hands, and how many blocks D has free."""

    stage: Stage
    prefill: Actor
    decode: Actor
    free: int

    def free_now(self) -> int:
        return int(self.decode.call("scheduler.free_blocks"))

    def ask_and_hang_up(self) -> tuple[Prompt, int]:
        """A prompt whose read is under way and whose client is gone; the free blocks before."""
        prompt = self.stage.prompt(TOKENS)
        asks = self.prefill.compute(prompt)
        self.prefill.hold()
        self.decode.ask(*asks)
        before = self.free_now()
        assert before < self.free
        self.decode.call("hang_up", prompt.name)
        self.decode.call("tick")
        return prompt, before

    def settle(self, prompt: Prompt) -> None:
        """Steps until D's workers have reported the prompt, and tells the scheduler."""
        end = time.monotonic() + _OVER_SECONDS
        seen = self.decode.watch(prompt)
        while seen.waiting and time.monotonic() < end:
            seen = self.decode.watch(prompt)
        assert not seen.waiting, seen
        self.decode.call("loaded", [prompt.name])
        self.decode.call("tick")


def _staged_pair(stage: Stage) -> Pair:
    settings = (("KVPATCH_TRANSFER", "staged"), ("KVPATCH_STAGING_BYTES", str(1 << 20)))
    prefill = stage.prefill(replace(SPEC, block_tokens=32))
    decode = stage.decode(replace(OWN, settings=settings))
    return _introduced(stage, prefill, decode, 300)


def _pair(stage: Stage, *, patched: bool = True) -> Pair:
    prefill, decode = stage.prefill(SPEC), stage.decode(OWN, patched=patched)
    return _introduced(stage, prefill, decode, TOKENS)


def _introduced(stage: Stage, prefill: Actor, decode: Actor, tokens: int) -> Pair:
    """The pair behind a prompt that D has loaded or computed, and given back."""
    prompts = stage.prompts(1, tokens)
    introduce(decode, prompts, prefill)
    if decode.call("scheduler.status", prompts[0].name) == "WAITING_FOR_REMOTE_KVS":
        decode.call("loaded", [prompts[0].name])
        decode.call("tick")
    return Pair(stage, prefill, decode, int(decode.call("scheduler.free_blocks")))


@pytest.mark.every_release
def test_blocks_are_kept_until_the_read_is_over(stage: Stage) -> None:
    pair = _pair(stage)

    prompt, before = pair.ask_and_hang_up()
    assert pair.free_now() == before
    pair.prefill.go_on()
    pair.settle(prompt)

    assert pair.free_now() == pair.free
    assert pair.prefill.heard([prompt]) == {prompt.name}


@pytest.mark.on(before="0.16")  # else: a request that ends while it is loaded keeps its blocks
def test_stock_hands_them_out_at_once(stage: Stage) -> None:
    pair = _pair(stage, patched=False)

    prompt, _ = pair.ask_and_hang_up()
    assert pair.free_now() == pair.free
    pair.prefill.go_on()
    pair.decode.watch(prompt)

    # P's bytes have come into blocks that the scheduler may have given to another request.
    assert pair.decode.call("written", prompt.name) > 0


def test_blocks_come_back_when_the_peer_dies(stage: Stage) -> None:
    """Its load fails; <= 0.11.0, where no load can, it is reported since nobody waits for it."""
    pair = _pair(stage)

    prompt, before = pair.ask_and_hang_up()
    assert pair.free_now() == before
    pair.prefill.die()
    pair.settle(prompt)

    assert pair.free_now() == pair.free


@pytest.mark.on(states_block_size=False)
def test_a_load_that_failed_before_its_client_gave_up(stage: Stage) -> None:
    pair = _pair(stage)
    prompt = stage.prompt(TOKENS)
    asks = pair.prefill.compute(prompt)

    pair.prefill.hold()
    pair.decode.ask(*asks)
    pair.prefill.die()
    pair.decode.must_log(prompt, prompt.name)
    before = pair.free_now()
    pair.decode.call("hang_up", prompt.name)
    pair.settle(prompt)

    assert before < pair.free == pair.free_now()


@_NAMED_BY_CLIENTS
@pytest.mark.parametrize("way", ["release's own", "staged"])
def test_a_retry_under_the_same_name(stage: Stage, lab: Lab, way: str) -> None:
    """<= 0.13 a client chooses the name, and a retry may come before the first read is over."""
    if way == "staged" and not states_layout(lab.release):
        pytest.skip("no unlike pair here")
    pair = _pair(stage) if way == "release's own" else _staged_pair(stage)
    first, second = stage.prompts(2, 5 * SPEC.block_tokens)
    asks = pair.prefill.compute(first, second)
    retry = Ask(replace(second, name=first.name), asks[1].answer)

    pair.prefill.hold()
    pair.decode.ask(asks[0])
    pair.decode.call("hang_up", first.name)
    pair.decode.ask(retry)
    held = pair.free_now()
    wrong, total = pair.decode.wrong(retry.prompt)
    assert wrong > 0.9 * total, "nothing has come yet"
    pair.prefill.go_on()
    status = pair.decode.call("serve", first.name, _OVER_SECONDS)

    assert pair.decode.wrong(retry.prompt)[0] == 0
    assert status in ("FINISHED_LENGTH_CAPPED", "RUNNING"), status
    pair.decode.call("tick")
    assert held < pair.free == pair.free_now()
    assert pair.decode.left().staging_bytes == 0


@_NAMED_BY_CLIENTS
def test_a_retry_that_is_given_up_too(stage: Stage) -> None:
    pair = _pair(stage)
    first, second, third = stage.prompts(3, 2 * SPEC.block_tokens)
    asks = pair.prefill.compute(first, second, third)
    retries = [Ask(replace(ask.prompt, name=first.name), ask.answer) for ask in (asks[1], asks[2])]

    pair.prefill.hold()
    pair.decode.ask(asks[0])
    for retry in retries:
        pair.decode.call("hang_up", first.name)
        pair.decode.ask(retry)
    pair.prefill.go_on()
    pair.decode.call("serve", first.name, _OVER_SECONDS)

    assert pair.decode.wrong(retries[1].prompt)[0] == 0
    pair.decode.call("tick")
    assert pair.free_now() == pair.free
