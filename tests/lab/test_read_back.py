"""Turns that P reads back from D, which has answered them (``bidirectional_kv_xfer``).

D's steps are scheduled ahead of its answer, which stops where a block ends: its count of tokens and
its lists go on behind what the next turn may load.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvpatch.core.releases import FACTS

from .case import EngineSpec
from .engine_api import Ask, Prompt
from .host import Lab
from .scheduler import TO_BE_READ
from .stage import Actor, Stage
from .test_same_prompt import MODELS, SPEC

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(reads_back=True)]

_BOTH_WAYS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
_BLOCK, _TOKENS, _ANSWER = 16, 133, 12
_SPEC = replace(SPEC, patched=True)
_MODELS = {**MODELS, "windows alone": {"window_tokens": (40,)}}
#: How much longer the next turn is than the last one with its answer, and which token is edited.
_TURNS = {
    "kept": (30, ()),
    "without a token": (0, ()),
    "cut": (-3, ()),
    "stripped": (30, (_TOKENS + 2,)),
    "edited": (30, (70,)),
}


def _answering(spec: EngineSpec) -> EngineSpec:
    """An engine whose steps are ahead of its answers."""
    return replace(spec, answer_tokens=60, stops_after=_ANSWER, schedules_ahead=True)


def _turn(stage: Stage, prefill: Actor, decode: Actor) -> tuple[Prompt, str]:
    """A prompt that D has answered, and what it says of that."""
    prompt = stage.prompt(_TOKENS)
    (prefilled,) = prefill.complete(Ask(prompt, json.dumps(TO_BE_READ)))
    (answered,) = decode.complete(Ask(prompt, prefilled.answer))
    assert answered.status == "FINISHED_STOPPED"
    for _ in range(2):  # the step that was ahead, and the one that tells workers of the answer
        decode.call("tick")
    assert prefill.heard([prompt]) == {prompt.name}
    prefill.call("scheduler.forget")
    return prompt, json.dumps({**TO_BE_READ, **json.loads(answered.answer)})


@pytest.mark.parametrize("model", list(_MODELS))
@pytest.mark.parametrize("kind", ["like", "unlike"])
def test_a_turn_that_is_read_back(stage: Stage, kind: str, model: str) -> None:
    spec = replace(_SPEC, **_MODELS[model])  # type: ignore[arg-type]
    size = 2 if kind == "unlike" else 1
    larger = replace(spec, block_tokens=size * _BLOCK, planned_blocks=600 // size)
    prefill = stage.start(larger, _BOTH_WAYS)
    decode = stage.start(_answering(spec), _BOTH_WAYS)
    for name, (more, edits) in _TURNS.items():
        first, answer = _turn(stage, prefill, decode)
        turn = replace(stage.prompt(_TOKENS + _ANSWER + more), number=first.number, edits=edits)

        (served,) = prefill.complete(Ask(turn, answer))

        assert served.status == "FINISHED_LENGTH_CAPPED", name
        assert prefill.wrong(turn)[0] == 0, name
        if model == "attention" and name == "kept":
            assert served.computed < turn.tokens - _TOKENS, "D's answer is loaded as well"
        again = replace(stage.prompt(turn.tokens), number=first.number, edits=edits)
        (served,) = prefill.complete(Ask(again, ""))
        assert prefill.wrong(again)[0] == 0, f"{name}, from P's prefix cache"


def test_an_edited_turn(lab: Lab, stage: Stage) -> None:
    """<= 0.22 vLLM keeps no blocks back for what is to be computed behind a turn's first half.

    Others took them, which stood in the queue behind it then, and P stood still for good.
    """
    first, decode = stage.start(_SPEC, _BOTH_WAYS), stage.start(_answering(_SPEC), _BOTH_WAYS)
    prefill = stage.start(_SPEC, _BOTH_WAYS)
    for edits in ((70,), ()):
        prompt, answer = _turn(stage, first, decode)
        turn = replace(stage.prompt(_TOKENS + _ANSWER + 30), number=prompt.number, edits=edits)

        (served,) = prefill.complete(Ask(turn, answer))

        is_loaded = not edits or FACTS[lab.release].reserves_for_loads
        assert (served.computed < turn.tokens) == is_loaded
        assert prefill.wrong(turn)[0] == 0


@pytest.mark.parametrize("more", [0, 30])
def test_a_state_that_has_the_last_token(stage: Stage, more: int) -> None:
    """P leaves out its prompt's last token, and computes the one before it in any case."""
    spec = replace(_SPEC, **MODELS["states"])  # type: ignore[arg-type]
    prefill = stage.start(spec, _BOTH_WAYS)
    decode = stage.start(replace(spec, answer_tokens=60, stops_after=_ANSWER), _BOTH_WAYS)
    first, answer = _turn(stage, prefill, decode)
    turn = replace(stage.prompt(_TOKENS + _ANSWER + more), number=first.number)

    (served,) = prefill.complete(Ask(turn, answer))

    loaded = _TOKENS + _ANSWER - 1 if more else 0
    assert served.computed == turn.tokens - 1 - loaded
    assert prefill.wrong(turn)[0] == 0


def test_a_state_behind_drafts(stage: Stage) -> None:
    """It lies in the block of the last draft that was taken, which D's scheduler cannot tell."""
    spec = replace(_SPEC, drafted_states=3, **MODELS["states"])  # type: ignore[arg-type]
    prefill, plain = (
        stage.start(spec, _BOTH_WAYS),
        stage.start(replace(spec, patched=False), _BOTH_WAYS),
    )
    decode = stage.start(replace(spec, answer_tokens=60, stops_after=_ANSWER), _BOTH_WAYS)
    for of_turn in (prefill, plain):
        first, answer = _turn(stage, prefill, decode)
        turn = replace(stage.prompt(_TOKENS + _ANSWER + 30), number=first.number)

        (served,) = of_turn.complete(Ask(turn, answer))

        assert served.computed == turn.tokens - 1
        assert of_turn.wrong(turn)[0] == 0


@pytest.mark.on(since="0.25")  # else: no such layers
@pytest.mark.parametrize("tokens", [_BLOCK, 2 * _BLOCK])
def test_a_turn_with_a_gap(stage: Stage, tokens: int) -> None:
    """D has let go of blocks between the prompt and the end of its answer (R-SWA)."""
    window, answer = 20, 90
    spec = replace(_SPEC, reference_window=window)
    prefill = stage.start(spec, _BOTH_WAYS)
    other = replace(spec, block_tokens=tokens, planned_blocks=600 * _BLOCK // tokens)
    decode = stage.start(replace(other, answer_tokens=150, stops_after=answer), _BOTH_WAYS)
    first, said = _turn(stage, prefill, decode)
    assert 0 in json.loads(said)["remote_block_ids"][0][:-1]
    turn = replace(stage.prompt(_TOKENS + answer + 30), number=first.number)

    (served,) = prefill.complete(Ask(turn, said))

    assert served.status == "FINISHED_LENGTH_CAPPED"
    assert prefill.wrong(turn)[0] == 0
