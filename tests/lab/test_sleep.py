"""Sleep mode: what NIXL was handed is let go of, and handed to it again (from 0.33)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .engine_api import Left
from .stage import Stage
from .test_several_peers import SPEC, TOKENS
from .test_stale_blocks import prefill as with_holds

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.33")]

DECODE = {
    "direct": SPEC,
    "staged": replace(SPEC, settings=(("KVPATCH_TRANSFER", "staged"),)),
    "through a host buffer": replace(SPEC, settings=(("KVPATCH_HOST_BUFFER", "always"),)),
}


@pytest.mark.parametrize("way", DECODE)
def test_a_heterogeneous_pair_goes_on_after_either_has_slept(stage: Stage, way: str) -> None:
    prefill = stage.prefill(replace(SPEC, block_tokens=16, planned_blocks=400))
    decode = stage.decode(DECODE[way])
    for sleepers in ((), (prefill,), (decode,), (prefill, decode), ()):
        for sleeper in sleepers:
            sleeper.call("sleep_and_wake")
        prompt = stage.load(prefill, decode, TOKENS)
        assert prefill.heard([prompt]) == {prompt.name}
    assert decode.strays() == 0
    assert decode.left() == Left()


@pytest.mark.parametrize("block_tokens", [SPEC.block_tokens, 16])
def test_what_p_held_before_it_slept_is_gone(stage: Stage, block_tokens: int) -> None:
    """Its requests are P's still, but their blocks hold nothing any more."""
    spec = replace(SPEC, block_tokens=block_tokens, planned_blocks=400)
    actor, decode = with_holds(stage, spec, patched=True), stage.decode(SPEC)
    prompt = stage.prompt(TOKENS)
    asks = actor.compute(prompt)
    actor.call("sleep_and_wake")

    decode.ask(*asks)

    decode.must_fail(prompt)
