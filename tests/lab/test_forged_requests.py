"""What one client sends teaches D nothing that other clients' prompts are read by."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from .case import EngineSpec
from .engine_api import Ask
from .host import Lab
from .releases import states_block_size, states_kernel_blocks
from .stage import Raised, Stage

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

#: FlashInfer's kernels take blocks of 64 tokens: P cuts its blocks of 128 in two.
_KERNEL_TOKENS = 64


@pytest.fixture(autouse=True)
def _release_is_mute(lab: Lab) -> None:
    if not states_block_size(lab.release) or states_kernel_blocks(lab.release):
        pytest.skip("no block is cut, or the handshake says into what")


def _spec(block_tokens: int) -> EngineSpec:
    parts = block_tokens // _KERNEL_TOKENS
    return EngineSpec("flashinfer", "HND", block_tokens, 60, parts=parts, device="cuda")


def _forged(ask: Ask, ids: Callable[[list[int]], list[int]]) -> Ask:
    """What P answered, with other block ids of the only group."""
    answer: dict[str, Any] = json.loads(ask.answer)
    found = answer["remote_block_ids"]
    is_nested = isinstance(found[0], list)
    made = ids(found[0] if is_nested else found)
    answer["remote_block_ids"] = [made] if is_nested else made
    return replace(ask, answer=json.dumps(answer))


def _halves(blocks: list[int]) -> list[int]:
    """The kernel blocks of blocks that are cut in two: as if P's blocks were half as large."""
    return [part for block in blocks for part in (2 * block, 2 * block + 1)]


def _others(blocks: list[int]) -> list[int]:
    """Twice as many, whoever has them."""
    return [1 + number for number in range(2 * len(blocks))]


@pytest.mark.parametrize("ids", [_halves, _others])
def test_a_forged_request_teaches_no_block_size(
    lab: Lab, ids: Callable[[list[int]], list[int]]
) -> None:
    """10 ids for a prompt of 640 tokens, of which P's blocks of 128 hold five."""
    with Stage(lab) as stage:
        p, d = stage.prefill(_spec(128)), stage.decode(_spec(64))
        forged, short, honest, last = (stage.prompt(n) for n in (640, 40, 600, 40))
        (ask,) = p.compute(forged)
        with suppress(Raised):  # the halves are where the prompt lies: they show the truth
            d.introduce(_forged(ask, ids))

        for prompt in (short, honest, last):
            (ask,) = p.compute(prompt)
            if prompt is last or not d.introduce(ask):
                continue
            seen = d.watch(prompt)
            assert seen.received == {prompt.name} and d.wrong(prompt)[0] == 0, seen

        assert d.ask(ask) == last.tokens
        assert d.watch(last).received == {last.name}
        assert d.wrong(last)[0] == 0
        assert d.strays() == 0


def test_a_peer_that_cannot_be_read_leaves_d_computing(lab: Lab) -> None:
    """Its handshake fails, and nobody waits for the request: vLLM's own scheduler goes on."""
    with Stage(lab) as stage:
        p = stage.prefill(replace(_spec(64), head_dim=18))
        d = stage.decode(replace(_spec(64), own_scheduler=True))
        for prompt in stage.prompts(2, 100):
            (ask,) = p.compute(prompt)
            with pytest.raises(Raised, match="NothingProven"):
                d.introduce(ask)
