"""A client that gives up while D loads its prompt: whose are the blocks meanwhile?

Both schedulers are the release's own. To 0.15 it hands out blocks that NIXL is writing to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from packaging.version import Version

from .engine_api import Prompt
from .host import Lab
from .releases import states_block_size
from .stage import Actor, Stage
from .test_several_peers import SPEC, TOKENS, introduce

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

OWN = replace(SPEC, own_scheduler=True)
_OVER_SECONDS = 20.0


def stock_keeps_blocks(release: str) -> bool:
    """From 0.16 a request that ends while it is loaded keeps its blocks until it is."""
    return Version(release) >= Version("0.16")


@dataclass(frozen=True)
class Pair:
    """Two engines that have shaken hands, and how many blocks D has free."""

    stage: Stage
    prefill: Actor
    decode: Actor
    free: int

    def free_now(self) -> int:
        return int(self.decode.call("free_blocks"))

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


def _pair(stage: Stage, *, patched: bool = True) -> Pair:
    prefill, decode = stage.prefill(SPEC), stage.decode(OWN, patched=patched)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    return Pair(stage, prefill, decode, int(decode.call("free_blocks")))


@pytest.fixture
def stage(lab: Lab) -> Iterator[Stage]:
    with Stage(lab) as opened:
        yield opened


@pytest.mark.every_release
def test_blocks_are_kept_until_the_read_is_over(stage: Stage) -> None:
    pair = _pair(stage)

    prompt, before = pair.ask_and_hang_up()
    assert pair.free_now() == before
    pair.prefill.go_on()
    pair.settle(prompt)

    assert pair.free_now() == pair.free
    assert pair.prefill.heard([prompt]) == {prompt.name}


def test_stock_hands_them_out_at_once(stage: Stage, lab: Lab) -> None:
    """What is mended here, and that the test sees it."""
    if stock_keeps_blocks(lab.release):
        pytest.skip("this release keeps them")
    pair = _pair(stage, patched=False)

    prompt, _ = pair.ask_and_hang_up()
    assert pair.free_now() == pair.free
    pair.prefill.go_on()
    pair.decode.watch(prompt)

    # P's bytes have come into blocks that the scheduler may have given to another request.
    assert pair.decode.call("written", prompt.name) > 0


def test_blocks_come_back_when_the_peer_dies(stage: Stage) -> None:
    """Its load fails; to 0.11.0, where no load can, it is reported since nobody waits for it."""
    pair = _pair(stage)

    prompt, before = pair.ask_and_hang_up()
    assert pair.free_now() == before
    pair.prefill.die()
    pair.settle(prompt)

    assert pair.free_now() == pair.free


def test_a_load_that_failed_before_its_client_gave_up(stage: Stage, lab: Lab) -> None:
    if states_block_size(lab.release):
        pytest.skip("this release fails the request itself")
    pair = _pair(stage)
    prompt = stage.prompt(TOKENS)
    asks = pair.prefill.compute(prompt)

    pair.prefill.hold()
    pair.decode.ask(*asks)
    pair.prefill.die()
    end = time.monotonic() + _OVER_SECONDS
    while not any(prompt.name in line for line in pair.decode.watch(prompt, seconds=0.1).logged):
        assert time.monotonic() < end
    before = pair.free_now()
    pair.decode.call("hang_up", prompt.name)
    pair.settle(prompt)

    assert before < pair.free == pair.free_now()
