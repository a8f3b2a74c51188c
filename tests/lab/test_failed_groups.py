"""A load that fails where the model has several cache groups: one request fails, and no more.

D's scheduler is the release's own. <= 0.29 stock calls such a load received, and the model
would go on over memory that nobody wrote.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import EngineSpec
from .engine_api import Prompt
from .stage import Actor, Stage
from .test_cache_groups import BLOCK_TOKENS, engine_of
from .test_failures import untouched
from .test_several_peers import introduce

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.18")]

TOKENS = 150
_P, _D = (
    replace(engine_of("two groups", tokens), kv_heads=4) for tokens in BLOCK_TOKENS["32 to 64"]
)


def _lose(stage: Stage, decode: Actor, spec: EngineSpec) -> tuple[Prompt, int]:
    """A prompt whose P dies while it is read; the blocks that D had free before."""
    prefill = stage.prefill(spec)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    free = int(decode.call("free_blocks"))
    prompt = stage.prompt(TOKENS)
    asks = prefill.compute(prompt)
    prefill.hold()
    decode.ask(*asks)
    assert decode.call("free_blocks") < free
    prefill.die()
    return prompt, free


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_fails(stage: Stage, ranks: int) -> None:
    decode = stage.decode(replace(_D, load_failure_policy="fail"))

    prompt, free = _lose(stage, decode, replace(_P, tp_size=ranks))
    seen = decode.watch(prompt)
    decode.call("loaded", [prompt.name])

    assert seen.failed == {prompt.name}, seen
    assert decode.call("status", prompt.name) == "FINISHED_ERROR"
    assert decode.call("free_blocks") == free
    assert untouched(decode, [prompt])
    stage.load(stage.prefill(_P), decode, TOKENS)


@pytest.mark.every_release
def test_it_is_computed_again(stage: Stage) -> None:
    decode = stage.decode(replace(_D, load_failure_policy="recompute"))

    prompt, free = _lose(stage, decode, _P)
    decode.must_fail(prompt)
    decode.call("loaded", [prompt.name])

    assert untouched(decode, [prompt])
    assert decode.finish(prompt) == "FINISHED_LENGTH_CAPPED"
    assert decode.wrong(prompt)[0] == 0
    assert decode.call("free_blocks") == free
    stage.load(stage.prefill(_P), decode, TOKENS)


@pytest.mark.on(before="0.30")
def test_stock_calls_it_received(stage: Stage) -> None:
    """What is mended here, and that the test sees it."""
    decode = stage.decode(_P, patched=False)

    prompt, _ = _lose(stage, decode, _P)

    decode.must_receive(prompt)
    assert untouched(decode, [prompt])
