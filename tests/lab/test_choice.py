"""What reads take is measured where a choice comes of it; bytes are the same before and after."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .engine_api import Left
from .host import Lab
from .stage import Stage
from .test_several_peers import SPEC, TOKENS, introduce, is_told_apart, left_of, unlike

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

#: How D is set, and whether it measures.
DECODE = {
    "by what was measured": ((), "yes"),
    "forced to be direct": ((("KVPATCH_TRANSFER", "direct"),), "never"),
    "forced to be staged": ((("KVPATCH_TRANSFER", "staged"),), "never"),
    "in the engine's steps": ((("KVPATCH_PROGRESS", "step"),), "never"),
}


@pytest.mark.parametrize("way", DECODE)
def test_reads_are_right_before_and_after_it_was_measured(lab: Lab, way: str) -> None:
    settings, expected = DECODE[way]
    if not is_told_apart(lab.release):
        pytest.skip("no heterogeneous pair here")
    with Stage(lab) as stage:
        prefills = [stage.prefill(spec) for spec in unlike(lab.release)]
        decode = stage.decode(replace(SPEC, settings=settings))
        firsts, thens = stage.prompts(2, TOKENS), stage.prompts(4, TOKENS)
        introduce(decode, firsts, *prefills)
        assert decode.unlike()
        for prompts in (thens[:2], thens[2:]):
            asks = [p.compute(one)[0] for p, one in zip(prefills, prompts, strict=True)]
            decode.ask(*asks)
            assert decode.watch(*prompts).received == {prompt.name for prompt in prompts}
            assert decode.wrong(*prompts)[0] == 0
            assert decode.measured() == expected
        assert decode.strays() == 0, "nothing of a cache was touched"
        assert left_of(decode, thens) == Left()


def test_a_like_pair_pays_for_nothing(lab: Lab) -> None:
    with Stage(lab) as stage:
        prefill, decode = stage.prefill(SPEC), stage.decode(SPEC)
        for prompt in stage.prompts(2, TOKENS):
            introduce(decode, [prompt], prefill)
            assert decode.measured() == "never"
        assert decode.unlike() == set()
        assert decode.wrong(prompt)[0] == 0
