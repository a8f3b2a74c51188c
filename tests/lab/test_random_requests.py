"""Random requests, of which nothing may look at what is not its own (random_requests.py).

Each play is played with a few seeds, which are the same in every run and named where one fails;
``LAB_SEEDS=100`` plays the first hundred.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

from kvpatch.patches import SLUGS

from .case import EngineSpec
from .engine_api import Failure
from .host import Lab
from .random_requests import Play

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_SEEDS = int(os.environ.get("LAB_SEEDS", "4"))
_SPEC = EngineSpec(planned_blocks=64, step_tokens=48, own_scheduler=True, patched=True)
_FEW = replace(_SPEC, planned_blocks=14, step_tokens=24)
_LARGER = replace(_SPEC, block_tokens=32)
_WINDOWS = replace(_SPEC, planned_blocks=100, window_tokens=(0, 24))
_WINDOWS_ALONE = replace(_WINDOWS, window_tokens=(24,), step_tokens=24)
_SHORT_WINDOWS = replace(_WINDOWS_ALONE, window_tokens=(16,), planned_blocks=140)
_STATES = replace(_SPEC, planned_blocks=100, has_state=True)
_KEPT_STATES = replace(_STATES, step_tokens=32, state_mode="align")


def _ahead(spec: EngineSpec) -> EngineSpec:
    return replace(spec, schedules_ahead=True)


PLAYS = {
    "few blocks": Play(_SPEC, _ahead(_FEW), fails=True),
    "larger blocks at P": Play(_LARGER, _SPEC, fails=True),
    "larger blocks at D": Play(_SPEC, _ahead(_LARGER)),
    "windows": Play(_WINDOWS, _ahead(_WINDOWS), fails=True),
    "unlike windows": Play(replace(_WINDOWS, block_tokens=32), _WINDOWS),
    "windows, larger blocks at D": Play(_WINDOWS, replace(_WINDOWS, block_tokens=32)),
    "windows alone, larger blocks at D": Play(
        _SHORT_WINDOWS, replace(_SHORT_WINDOWS, block_tokens=32)
    ),
    "windows alone, recomputed": Play(
        _WINDOWS_ALONE, replace(_WINDOWS_ALONE, load_failure_policy="recompute"), fails=True
    ),
    "states": Play(_STATES, _STATES, fails=True),
    "recomputed": Play(_SPEC, replace(_FEW, load_failure_policy="recompute"), fails=True),
    "turns": Play(_SPEC, _ahead(replace(_SPEC, planned_blocks=40)), fails=True, has_turns=True),
    "turns of windows": Play(_WINDOWS, _WINDOWS, has_turns=True),
    "turns of windows, larger blocks at D": Play(
        replace(_WINDOWS, window_tokens=(0, 64)),
        replace(_WINDOWS, window_tokens=(0, 64), block_tokens=32),
        has_turns=True,
    ),
    "turns of states": Play(_STATES, _STATES, fails=True, has_turns=True),
    "kept states": Play(_KEPT_STATES, _ahead(_KEPT_STATES)),
    "kept states that fail": Play(_KEPT_STATES, _KEPT_STATES, fails=True),
    "turns of kept states": Play(_KEPT_STATES, _KEPT_STATES, has_turns=True),
}


def _play(lab: Lab, name: str) -> None:
    """Plays all seeds; each kind of event that it is about must have come."""
    play = PLAYS[name]
    if lab.release == "0.21.0":  # it books a token twice where a step ahead is taken back
        play = replace(play, decode=replace(play.decode, schedules_ahead=False))
    engine, total = lab.hire(play.decode), Counter[str]()
    for seed in range(1, 1 + _SEEDS):
        answer = engine.call("play_at_random", play, seed)
        assert not isinstance(answer, Failure), f"seed {seed}: {answer.trace}"
        total += answer
    lab.dismiss(engine)
    assert total["loaded"]
    assert not play.fails or total["transfer"] or total["check"]


@pytest.mark.on(since="0.11.1")  # else: no load fails alone
@pytest.mark.parametrize("name", ["few blocks", "larger blocks at P", "larger blocks at D"])
def test_attention(lab: Lab, name: str) -> None:
    _play(lab, name)


@pytest.mark.on(since="0.20")  # else: P lets go of more of a window, and D's worker refuses it
@pytest.mark.parametrize(
    "name",
    [
        "windows",
        "unlike windows",
        "windows, larger blocks at D",
        "windows alone, larger blocks at D",
        "windows alone, recomputed",
    ],
)
def test_windows(lab: Lab, name: str) -> None:
    _play(lab, name)


@pytest.mark.on(since="0.13")  # else: a failed load is always recomputed
def test_loads_that_are_recomputed(lab: Lab) -> None:
    _play(lab, "recomputed")


@pytest.mark.on(since="0.28")  # else: its store's scheduler half has other fields
@pytest.mark.parametrize(("block_tokens", "loads"), [(16, 1), (32, 0)])
def test_windows_that_another_connector_stores(lab: Lab, block_tokens: int, loads: int) -> None:
    """Blocks of P's that fill one of D's in part are in no store; all tokens are P's or D's own."""
    spec = replace(_WINDOWS, block_tokens=block_tokens, in_multi=True, stores_blocks=True)
    engine = lab.hire(spec)
    for tokens in (40, 47, 75):
        seen = engine.call("play_store", Play(_WINDOWS, spec), tokens)
        assert not isinstance(seen, Failure), seen.trace
        assert seen["loaded"] == loads
        assert seen["copied back"]
    lab.dismiss(engine)


@pytest.mark.on(prefill_count=True)  # else: P computes a prompt's last token, and D loads no state
def test_states(lab: Lab) -> None:
    _play(lab, "states")


@pytest.mark.on(since="0.24")  # else: no prefix cache of states beside a connector
@pytest.mark.parametrize("name", ["kept states", "kept states that fail"])
def test_states_in_prefix_caches(lab: Lab, name: str) -> None:
    _play(lab, name)


@pytest.mark.on(reads_back=True)
@pytest.mark.parametrize(
    "name", ["turns", "turns of windows", "turns of windows, larger blocks at D", "turns of states"]
)
def test_turns(lab: Lab, name: str) -> None:
    _play(lab, name)


@pytest.mark.on(since="0.24")  # else: no prefix cache of states beside a connector
def test_turns_of_states_in_prefix_caches(lab: Lab) -> None:
    _play(lab, "turns of kept states")


@pytest.mark.on(has_cache_groups=True)
def test_prompts_that_nobody_compares(lab: Lab) -> None:
    """The negative control: without the patch D goes on from another prompt's tokens."""
    play = PLAYS["larger blocks at P"]
    spec = replace(play.decode, patches=tuple(slug for slug in SLUGS if slug != "same_prompt"))
    engine = lab.hire(spec)
    found = engine.call("play_at_random", play, 1)
    lab.dismiss(engine)
    assert isinstance(found, Failure)
    assert found.kind == "Wrong"
